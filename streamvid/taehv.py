"""TAEHV, the tiny video autoencoder (https://github.com/madebyollin/taehv), as modules that stream.

A stack of 2-D convolutions in which a *memory block* also sees the previous frame's input, a *pool* joins frames in
time and a *grow* splits them. The layer numbers of ``encoder`` and ``decoder`` are those of the published files;
every width, the patch size and the time factors are read from the tensors' shapes.

What a stream remembers between calls is one tensor a memory block and is passed in and out; the modules hold no
state, so any number of streams can share them. Knows nothing of chunks, trimming or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamvid.errors import CheckpointError

STAGES = 3
BLOCKS_PER_STAGE = 3
_DECODER_GROWS = (7, 13, 19)
_ENCODER_POOLS = (2, 7, 12)


@dataclass(frozen=True, kw_only=True)
class TAEHVConfig:
    """Sizes of one TAEHV, all inferred from its tensors by `infer_config`."""

    latent_channels: int = 16
    encoder_width: int = 64
    decoder_widths: tuple[int, ...] = (256, 128, 64, 64)
    patch_size: int = 1
    encoder_strides: tuple[int, ...] = (2, 2, 1)
    """Frames that each of the three pools joins."""
    decoder_strides: tuple[int, ...] = (1, 2, 2)
    """Frames into which each of the three grows splits one."""

    @property
    def temporal(self) -> int:
        """Pictures per latent frame."""
        return math.prod(self.decoder_strides)

    @property
    def spatial(self) -> int:
        """Pixels per latent row or column."""
        return 2**STAGES * self.patch_size


class MemoryBlock(nn.Module):
    """Residual block over the frame and its predecessor's input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        """``x`` and ``past``: ``[n, c, h, w]``, each frame and the one before it."""
        return F.relu(self.conv(torch.cat([x, past], dim=1)) + x)


class TimePool(nn.Module):
    """1x1 convolution over ``stride`` successive frames laid side by side in channels."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(width * stride, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return self.conv(x.reshape(n // self.stride, c * self.stride, h, w))


class TimeGrow(nn.Module):
    """1x1 convolution to ``stride`` frames laid side by side in channels, then laid out in time."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(width, width * stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return self.conv(x).reshape(n * self.stride, c, h, w)


class SoftClamp(nn.Module):
    """Keeps latents within +-3."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(x / 3)


class TAEHV(nn.Module):
    """Encoder and decoder of one TAEHV. Latents are in the model's normalised space; pictures are in 0..1."""

    def __init__(self, config: TAEHVConfig) -> None:
        super().__init__()
        self.config = config
        width, colours = config.encoder_width, 3 * config.patch_size**2
        encoder: list[nn.Module] = [nn.Conv2d(colours, width, 3, padding=1), nn.ReLU()]
        for stride in config.encoder_strides:
            encoder.append(TimePool(width, stride))
            encoder.append(nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False))
            encoder.extend(MemoryBlock(width) for _ in range(BLOCKS_PER_STAGE))
        encoder.append(nn.Conv2d(width, config.latent_channels, 3, padding=1))
        self.encoder = nn.Sequential(*encoder)

        widths = config.decoder_widths
        decoder: list[nn.Module] = [
            SoftClamp(),
            nn.Conv2d(config.latent_channels, widths[0], 3, padding=1),
            nn.ReLU(),
        ]
        for stage, stride in enumerate(config.decoder_strides):
            decoder.extend(MemoryBlock(widths[stage]) for _ in range(BLOCKS_PER_STAGE))
            decoder.append(nn.Upsample(scale_factor=2))
            decoder.append(TimeGrow(widths[stage], stride))
            decoder.append(nn.Conv2d(widths[stage], widths[stage + 1], 3, padding=1, bias=False))
        decoder += [nn.ReLU(), nn.Conv2d(widths[-1], colours, 3, padding=1)]
        self.decoder = nn.Sequential(*decoder)

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder[1].weight.dtype  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.decoder[1].weight.device  # type: ignore[return-value]


def run_stack(layers: nn.Sequential, x: Tensor, memory: dict[int, Tensor]) -> Tensor:
    """Push frames through ``layers``, continuing from ``memory``.

    Args:
        layers: ``TAEHV.encoder`` or ``TAEHV.decoder``.
        x: ``[b, t, c, h, w]``; for the encoder t is a multiple of the time factor.
        memory: layer number to its last input ``[b, c, h, w]``; entries are replaced, never written into. Empty at
            the start of a video.

    Returns:
        ``[b, t', c', h', w']``.
    """
    batch = x.shape[0]
    x = x.flatten(0, 1)
    for number, layer in enumerate(layers):
        if isinstance(layer, MemoryBlock):
            frames = x.unflatten(0, (batch, -1))
            first = memory.get(number)
            if first is None:
                first = torch.zeros_like(frames[:, 0])
            past = torch.cat([first[:, None], frames[:, :-1]], dim=1).flatten(0, 1)
            memory[number] = frames[:, -1]
            x = layer(x, past)
        else:
            x = layer(x)
    return x.unflatten(0, (batch, -1))


def infer_config(shapes: Mapping[str, tuple[int, ...]]) -> TAEHVConfig:
    """Sizes from tensor shapes.

    A published file may hold larger grow kernels than its time factor needs (the last rows are used, see
    `trim_grows`). The time factor is the encoder's; it is given to the grows from the last one backwards.

    Raises:
        CheckpointError: not a TAEHV, or a variant with other layers.
    """
    try:
        width = shapes["encoder.0.weight"][0]
        latent, colours = shapes["encoder.17.weight"][0], shapes["encoder.0.weight"][1]
        widths = tuple(shapes[f"decoder.{number}.weight"][0] for number in (1, 8, 14, 20))
        pools = tuple(shapes[f"encoder.{number}.conv.weight"][1] // width for number in _ENCODER_POOLS)
        rows = tuple(
            shapes[f"decoder.{n}.conv.weight"][0] // w for n, w in zip(_DECODER_GROWS, widths, strict=False)
        )
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"not a TAEHV of the plain layout (tensor {error} is missing); use taew2_1 or a file with the same layers"
        ) from None
    patch = math.isqrt(colours // 3)
    left, strides = math.prod(pools), [1] * STAGES
    for stage in reversed(range(STAGES)):
        strides[stage] = max(1, min(rows[stage], left))
        left //= strides[stage]
    return TAEHVConfig(
        latent_channels=latent,
        encoder_width=width,
        decoder_widths=widths,
        patch_size=patch,
        encoder_strides=pools,
        decoder_strides=tuple(strides),
    )


def trim_grows(state: Mapping[str, Tensor], config: TAEHVConfig) -> dict[str, Tensor]:
    """The state with each grow kernel cut to the last rows that its stride needs."""
    out = dict(state)
    for number, width, stride in zip(
        _DECODER_GROWS, config.decoder_widths, config.decoder_strides, strict=False
    ):
        name = f"decoder.{number}.conv.weight"
        if out[name].shape[0] > width * stride:
            out[name] = out[name][-width * stride :]
    return out

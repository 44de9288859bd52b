"""Streaming encode and decode: latents in, pictures out, any number of frames at a time.

A decoder object is one video's state over a shared autoencoder; the autoencoder itself is never written to, so
streams can be interleaved over one set of weights. Every latent frame goes through the whole network before the
next, so how a video is split into calls cannot change a bit of it. `AutoencoderKLWan` keeps the two newest inputs of
each causal convolution, TAEHV the newest input of each memory block.

Knows nothing of prompts, chunks' lengths or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.taehv import TAEHV


@dataclass(frozen=True)
class VaeGeometry:
    """Latent channels, pictures per latent frame, pixels per latent row."""

    latent_channels: int
    temporal: int
    spatial: int

    def num_frames(self, num_latents: int) -> int:
        """Pictures that ``num_latents`` latent frames of one video decode to: the first gives one picture."""
        return 1 + (num_latents - 1) * self.temporal if num_latents else 0

    def num_latents(self, num_frames: int) -> int:
        """Latent frames needed for at least ``num_frames`` pictures."""
        return 1 + -(-(num_frames - 1) // self.temporal) if num_frames else 0


class Decoder(Protocol):
    """One video being decoded."""

    geometry: VaeGeometry

    def decode_chunk(self, latents: Tensor) -> Tensor:
        """The pictures of the next latent frames.

        Args:
            latents: ``[b, f, c, h, w]`` in the model's normalised space.

        Returns:
            float32 ``[b, n, 3, H, W]`` in 0..1 on the autoencoder's device; n is ``1 + (f-1) * temporal`` for the
            first call of a video and ``f * temporal`` after it.
        """
        ...

    def reset(self) -> None:
        """Start a new video."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors from which `load_state_dict` continues bit for bit."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue a video saved by `state_dict`. Raises StreamvidError if it is of another autoencoder."""
        ...


class Encoder(Protocol):
    """One video being encoded."""

    geometry: VaeGeometry

    @property
    def pending(self) -> int:
        """Pictures received that do not fill a latent frame yet."""
        ...

    def encode(self, video: Tensor) -> Tensor:
        """The latent frames that the next pictures complete.

        Args:
            video: ``[b, n, 3, H, W]`` in 0..1. The first picture of a video makes a latent frame alone, then every
                ``temporal`` pictures; a rest waits for the next call.

        Returns:
            ``[b, f, c, h, w]`` in the model's normalised space, f may be 0; float32.
        """
        ...

    def reset(self) -> None:
        """Start a new video."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors from which `load_state_dict` continues bit for bit."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue a video saved by `state_dict`. Raises StreamvidError if it is of another autoencoder."""
        ...


def vae_geometry(vae: Any) -> VaeGeometry:
    """The scales of an `AutoencoderKLWan` or a `TAEHV`, from its configuration. Raises StreamvidError on another."""
    if isinstance(vae, TAEHV):
        return VaeGeometry(vae.config.latent_channels, vae.config.temporal, vae.config.spatial)
    config = getattr(vae, "config", None)
    if config is None or not hasattr(config, "temperal_downsample"):
        raise StreamvidError(
            f"{type(vae).__name__} cannot be streamed; give an AutoencoderKLWan or a TAEHV autoencoder"
        )
    halvings = len(config.dim_mult) - 1
    return VaeGeometry(
        latent_channels=config.z_dim,
        temporal=2 ** sum(bool(flag) for flag in config.temperal_downsample[:halvings]),
        spatial=2**halvings * (config.patch_size or 1),
    )


def make_decoder(vae: Any) -> Decoder:
    """A decoder of one video over ``vae`` (`AutoencoderKLWan` or `TAEHV`). Raises StreamvidError on another class."""
    vae_geometry(vae)
    if isinstance(vae, TAEHV):
        from streamvid.vae_taehv import TAEHVDecoder

        return TAEHVDecoder(vae)
    from streamvid.vae_wan import WanDecoder

    return WanDecoder(vae)


def make_encoder(vae: Any) -> Encoder:
    """An encoder of one video over ``vae`` (`AutoencoderKLWan` or `TAEHV`). Raises StreamvidError on another class."""
    vae_geometry(vae)
    if isinstance(vae, TAEHV):
        from streamvid.vae_taehv import TAEHVEncoder

        return TAEHVEncoder(vae)
    from streamvid.vae_wan import WanEncoder

    return WanEncoder(vae)


def check_latents(latents: Tensor, geometry: VaeGeometry) -> None:
    """Raises StreamvidError unless ``latents`` is ``[b, f, c, h, w]`` with the autoencoder's channels."""
    if latents.ndim != 5 or latents.shape[2] != geometry.latent_channels:
        raise StreamvidError(
            f"latents have shape {list(latents.shape)}; decoding takes [batch, frames, "
            f"{geometry.latent_channels} channels, rows, columns]"
        )


class PictureBuffer:
    """Groups arriving pictures: the first alone, then ``size`` at a time. What is left over waits."""

    def __init__(self, geometry: VaeGeometry) -> None:
        self.geometry = geometry
        self.rest: Tensor | None = None
        self.started = False

    @property
    def pending(self) -> int:
        return 0 if self.rest is None else self.rest.shape[1]

    def groups(self, video: Tensor) -> list[Tensor]:
        """Complete groups ``[b, n, 3, H, W]`` after adding ``video``. Raises StreamvidError on a wrong shape."""
        side = self.geometry.spatial
        if video.ndim != 5 or video.shape[2] != 3 or video.shape[3] % side or video.shape[4] % side:
            raise StreamvidError(
                f"video has shape {list(video.shape)}; encoding takes [batch, frames, 3, height, width] with height "
                f"and width divisible by {side}"
            )
        if self.rest is not None:
            video = torch.cat([self.rest, video.to(self.rest)], dim=1)
        size, start, out = self.geometry.temporal, 0, []
        while video.shape[1] - start >= (size if self.started else 1):
            end = start + (size if self.started else 1)
            out.append(video[:, start:end])
            start, self.started = end, True
        self.rest = video[:, start:].clone() if start < video.shape[1] else None
        return out

    def state(self) -> dict[str, Tensor]:
        out = {"started": torch.tensor(int(self.started))}
        return out if self.rest is None else out | {"rest": self.rest}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.started = bool(state["started"])
        self.rest = state.get("rest")

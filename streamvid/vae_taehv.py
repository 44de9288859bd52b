"""Streaming over TAEHV: one latent frame through the whole network, then the next.

The decoder drops the first ``temporal - 1`` pictures of a video, as the reference does, so that latents and pictures
line up as with the Wan autoencoder. The encoder has two alignments. The default lines up with the decoder: the first
picture fills a latent frame alone (repeated). The reference instead groups pictures from the first one on and
repeats the last one; `TAEHVEncoder.encode_reference` does that, for comparison with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.taehv import TAEHV, MemoryBlock, run_stack
from streamvid.vae import PictureBuffer, check_latents, vae_geometry


def _memory_state(memory: dict[int, Tensor]) -> dict[str, Tensor]:
    return {f"memory.{number}": tensor for number, tensor in memory.items()}


def _load_memory(state: Mapping[str, Tensor], layers: torch.nn.Sequential, like: Tensor) -> dict[int, Tensor]:
    """Inverse of `_memory_state`. Raises StreamvidError if the layers are not those of ``layers``."""
    numbers = {int(name.removeprefix("memory.")) for name in state if name.startswith("memory.")}
    blocks = {number for number, layer in enumerate(layers) if isinstance(layer, MemoryBlock)}
    if numbers and numbers != blocks:
        raise StreamvidError(
            "the saved autoencoder state is of another autoencoder; restore it with the model that saved it"
        )
    return {number: state[f"memory.{number}"].to(like) for number in numbers}


class TAEHVDecoder:
    """A video being decoded by TAEHV; see `streamvid.vae.Decoder`."""

    def __init__(self, model: TAEHV) -> None:
        self.model = model
        self.geometry = vae_geometry(model)
        self._memory: dict[int, Tensor] = {}

    @torch.no_grad()
    def decode_raw(self, latents: Tensor) -> Tensor:
        """``temporal`` pictures for every latent frame, in the network's dtype, not clamped and not trimmed."""
        check_latents(latents, self.geometry)
        latents = latents.to(self.model.device, self.model.dtype)
        out = [
            run_stack(self.model.decoder, latents[:, number : number + 1], self._memory)
            for number in range(latents.shape[1])
        ]
        if not out:
            b, _, _, h, w = latents.shape
            side = self.geometry.spatial
            return latents.new_empty(b, 0, 3, h * side, w * side)
        return F.pixel_shuffle(torch.cat(out, dim=1), self.model.config.patch_size)

    def decode_chunk(self, latents: Tensor) -> Tensor:
        first = not self._memory
        pictures = self.decode_raw(latents).float().clamp(0, 1)
        return pictures[:, self.geometry.temporal - 1 :] if first else pictures

    def reset(self) -> None:
        self._memory = {}

    def state_dict(self) -> dict[str, Tensor]:
        return _memory_state(self._memory)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._memory = _load_memory(state, self.model.decoder, next(self.model.decoder.parameters()))


class TAEHVEncoder:
    """A video being encoded by TAEHV; see `streamvid.vae.Encoder`."""

    def __init__(self, model: TAEHV) -> None:
        self.model = model
        self.geometry = vae_geometry(model)
        self._memory: dict[int, Tensor] = {}
        self._buffer = PictureBuffer(self.geometry)

    @property
    def pending(self) -> int:
        return self._buffer.pending

    def _encode_group(self, pictures: Tensor) -> Tensor:
        x = F.pixel_unshuffle(pictures.to(self.model.device, self.model.dtype), self.model.config.patch_size)
        return run_stack(self.model.encoder, x, self._memory).float()

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        size = self.geometry.temporal
        out = [
            self._encode_group(group if group.shape[1] == size else group.expand(-1, size, -1, -1, -1))
            for group in self._buffer.groups(video)
        ]
        if out:
            return torch.cat(out, dim=1)
        b, _, _, height, width = video.shape
        side = self.geometry.spatial
        shape = (b, 0, self.geometry.latent_channels, height // side, width // side)
        return torch.empty(shape, device=self.model.device)

    @torch.no_grad()
    def encode_reference(self, video: Tensor) -> Tensor:
        """A whole video in the reference's alignment: ``[b, n, 3, H, W]`` to ``[b, ceil(n / temporal), c, h, w]``.

        Independent of, and without effect on, the stream in progress.
        """
        size = self.geometry.temporal
        short = -video.shape[1] % size
        if short:
            video = torch.cat([video, video[:, -1:].expand(-1, short, -1, -1, -1)], dim=1)
        whole = TAEHVEncoder(self.model)
        return torch.cat([whole._encode_group(group) for group in video.split(size, dim=1)], dim=1)

    def reset(self) -> None:
        self._memory = {}
        self._buffer = PictureBuffer(self.geometry)

    def state_dict(self) -> dict[str, Tensor]:
        return _memory_state(self._memory) | self._buffer.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._memory = _load_memory(state, self.model.encoder, next(self.model.encoder.parameters()))
        self._buffer.load(state)

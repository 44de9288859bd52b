"""Streaming over diffusers' `AutoencoderKLWan`: its own networks, with the feature cache held outside.

The class keeps its cache in attributes and clears it around every call; here the cache is a list the stream owns.
Works for every configuration of the class whose networks run with a cache (patched, residual, any time factor).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.vae import PictureBuffer, check_latents, vae_geometry

_EMPTY, _SKIPPED, _KEPT = 0, 1, 2
_SKIP_MARK = "Rep"
"""What diffusers writes into the cache of a time-upsampling layer that let the first frame pass."""


class FeatureCache:
    """The inputs that the causal convolutions of one network remember; one slot a convolution."""

    def __init__(self, network: torch.nn.Module) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

        self.slots: list[Any] = [None] * sum(isinstance(m, WanCausalConv3d) for m in network.modules())

    def clear(self) -> None:
        self.slots = [None] * len(self.slots)

    @property
    def empty(self) -> bool:
        return all(slot is None for slot in self.slots)

    def state(self) -> dict[str, Tensor]:
        """Flat tensors: what each slot holds (``marks``) and the kept features."""
        marks = [
            _EMPTY if slot is None else _KEPT if isinstance(slot, Tensor) else _SKIPPED for slot in self.slots
        ]
        kept = {f"feature.{i}": slot for i, slot in enumerate(self.slots) if isinstance(slot, Tensor)}
        return {"marks": torch.tensor(marks)} | kept

    def load(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Take over ``state`` in ``like``'s dtype and device. Raises StreamvidError if it is of another network."""
        marks = state["marks"].tolist() if "marks" in state else []
        if len(marks) != len(self.slots):
            raise StreamvidError(
                f"the saved autoencoder state has {len(marks)} layers, this autoencoder {len(self.slots)}; "
                "restore it with the model that saved it"
            )
        self.slots = [
            state[f"feature.{i}"].to(like) if mark == _KEPT else _SKIP_MARK if mark == _SKIPPED else None
            for i, mark in enumerate(marks)
        ]


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents, float32 ``[c, 1, 1]``."""
    config = vae.config
    for name in ("latents_mean", "latents_std"):
        if len(getattr(config, name)) != config.z_dim:
            raise StreamvidError(
                f"the autoencoder's {name} has {len(getattr(config, name))} values for {config.z_dim} latent "
                "channels; give one value a channel in its config.json"
            )
    mean, std = (
        torch.tensor(values, device=vae.device) for values in (config.latents_mean, config.latents_std)
    )
    return mean[:, None, None], std[:, None, None]


class WanDecoder:
    """A video being decoded by an `AutoencoderKLWan`; see `streamvid.vae.Decoder`."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.geometry = vae_geometry(vae)
        self._mean, self._std = _statistics(vae)
        self._cache = FeatureCache(vae.decoder)

    @torch.no_grad()
    def decode_raw(self, latents: Tensor) -> Tensor:
        """As `decode_chunk`, but the network's own output, about -1..1 and not clamped, in its dtype."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        check_latents(latents, self.geometry)
        z = latents.to(self._mean) * self._std + self._mean
        z = z.to(self.vae.dtype).transpose(1, 2)
        out = []
        for number in range(z.shape[2]):
            first = self._cache.empty
            x = self.vae.post_quant_conv(z[:, :, number : number + 1])
            out.append(self.vae.decoder(x, feat_cache=self._cache.slots, feat_idx=[0], first_chunk=first))
        if not out:
            b, _, _, h, w = latents.shape
            side = self.geometry.spatial
            return z.new_empty(b, 0, 3, h * side, w * side)
        pictures = torch.cat(out, dim=2)
        if self.vae.config.patch_size is not None:
            pictures = unpatchify(pictures, patch_size=self.vae.config.patch_size)
        return pictures.transpose(1, 2)

    def decode_chunk(self, latents: Tensor) -> Tensor:
        return self.decode_raw(latents).float().mul(0.5).add(0.5).clamp(0, 1)

    def reset(self) -> None:
        self._cache.clear()

    def state_dict(self) -> dict[str, Tensor]:
        return self._cache.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._cache.load(state, next(self.vae.decoder.parameters()))


class WanEncoder:
    """A video being encoded by an `AutoencoderKLWan` (the mean, not a sample); see `streamvid.vae.Encoder`."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.geometry = vae_geometry(vae)
        self._mean, self._std = _statistics(vae)
        self._cache = FeatureCache(vae.encoder)
        self._buffer = PictureBuffer(self.geometry)

    @property
    def pending(self) -> int:
        return self._buffer.pending

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

        out = []
        for group in self._buffer.groups(video):
            x = (group.to(self.vae.device).float() * 2 - 1).to(self.vae.dtype).transpose(1, 2)
            if self.vae.config.patch_size is not None:
                x = patchify(x, patch_size=self.vae.config.patch_size)
            features = self.vae.encoder(x, feat_cache=self._cache.slots, feat_idx=[0])
            mean = self.vae.quant_conv(features)[:, : self.geometry.latent_channels]
            out.append((mean.transpose(1, 2).float() - self._mean) / self._std)
        if out:
            return torch.cat(out, dim=1)
        b, _, _, height, width = video.shape
        side = self.geometry.spatial
        return self._mean.new_empty(b, 0, self.geometry.latent_channels, height // side, width // side)

    def reset(self) -> None:
        self._cache.clear()
        self._buffer = PictureBuffer(self.geometry)

    def state_dict(self) -> dict[str, Tensor]:
        return self._cache.state() | self._buffer.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._cache.load(state, next(self.vae.encoder.parameters()))
        self._buffer.load(state)

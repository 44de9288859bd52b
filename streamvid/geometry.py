"""The sizes of a Wan transformer, read from its configuration and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from streamvid.errors import StreamvidError
from streamvid.memory.geometry import KVGeometry


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What the rest of the runtime may know of a model."""

    layers: int
    heads: int
    head_dim: int
    patch: tuple[int, int]
    """Latent rows and columns of one token."""
    in_channels: int
    """Channels the network is fed: the latent's, and those of an image condition."""
    out_channels: int
    """Channels of the latent."""
    text_dim: int
    ffn_dim: int
    image_dim: int | None
    """Width of image embeddings the model cross-attends to; None if it takes none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """From a ``WanTransformer3DModel`` configuration.

        Raises:
            StreamvidError: a temporal patch other than 1, which chunk-wise streaming cannot divide.
        """
        time, *space = config["patch_size"]
        if time != 1:
            raise StreamvidError(
                f"only a temporal patch of 1 is supported, the model has patch_size {[time, *space]}"
            )
        return cls(
            layers=config["num_layers"],
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            patch=(space[0], space[1]),
            in_channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            text_dim=config["text_dim"],
            ffn_dim=config["ffn_dim"],
            image_dim=config.get("image_dim"),
        )

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def condition_channels(self) -> int:
        """Channels of the image condition that is concatenated to the latent; 0 for text-to-video models."""
        return self.in_channels - self.out_channels

    def grid(self, latent_height: int, latent_width: int) -> tuple[int, int]:
        """Token (rows, columns) of one latent frame.

        Raises:
            StreamvidError: the latent is not a whole number of patches.
        """
        for size, patch, name in zip(
            (latent_height, latent_width), self.patch, ("height", "width"), strict=True
        ):
            if size < patch or size % patch:
                low, high = max(size // patch, 1) * patch, (size // patch + 1) * patch
                raise StreamvidError(
                    f"latent {name} {size} is not a multiple of the model's patch of {patch}; use {low} or {high}"
                )
        return latent_height // self.patch[0], latent_width // self.patch[1]

    def kv(
        self,
        batch: int,
        latent_height: int,
        latent_width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVGeometry:
        """The geometry of a cache for latents of this size."""
        return KVGeometry(
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            grid=self.grid(latent_height, latent_width),
            batch=batch,
            dtype=dtype,
            device=device,
        )

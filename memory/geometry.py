"""The shape of a cache: layers, heads, tokens. Knows no model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Sizes of the keys and values one stream holds."""

    layers: int
    heads: int
    head_dim: int
    grid: tuple[int, int]
    """Token rows and columns of one latent frame."""
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise ValueError(f"grid must be (rows, columns) of at least 1 token, got {self.grid}")

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one latent frame."""
        return math.prod(self.grid)

    def frame_bytes(self, heads: int | None = None) -> int:
        """Bytes of the keys and values of one latent frame in ONE layer, uncompressed, over all batch items."""
        heads = self.heads if heads is None else heads
        return 2 * self.batch * self.tokens_per_frame * heads * self.head_dim * self.dtype.itemsize

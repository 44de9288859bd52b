"""A codec for each tier of the cache: exact where attention looks hardest, small where the history is long.

``mixed:recent=none,older=int4`` keeps the sink and the newest frames as they are and packs what is older. A tier is
any other codec; settings of it are separated by semicolons: ``mixed:older=qvg:bits=2;stages=2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.memory.codecs.base import KVCodec, PackedKV, packed_bytes

TIERS = ("sink", "recent", "older", "oldest")


@lru_cache(maxsize=64)
def _tier_codec(spec: str) -> KVCodec:
    from streamvid.memory.codecs import make_codec  # the table imports this file

    name = spec.partition(":")[0]
    if name in ("mixed", "offload"):
        raise ValueError(
            f"codec mixed: a tier cannot be {name}; name a codec that packs (offload takes mixed inside)"
        )
    return make_codec(spec.replace(";", ","))


@dataclass(kw_only=True)
class Mixed:
    """Tiers by region and age; a block that changes tier is packed anew."""

    sink: str = "none"
    """Codec of the sink."""
    recent: str = "none"
    """Codec of frames younger than ``recent_frames``, and of synthetic tokens (region side)."""
    recent_frames: int = 3
    """Latent frames counted as recent."""
    older: str = "int4"
    """Codec of what is older, and of the region memory."""
    oldest: str | None = None
    """Codec of frames of age ``oldest_from`` and more; none = ``older`` for these too."""
    oldest_from: int | None = None
    """Age in latent frames at which ``oldest`` begins."""

    token_wise: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.recent_frames < 0:
            raise ValueError(f"codec mixed: recent_frames={self.recent_frames} (allowed: 0 and more)")
        if (self.oldest is None) != (self.oldest_from is None):
            raise ValueError("codec mixed: oldest and oldest_from only work together; give both or neither")
        if self.oldest_from is not None and self.oldest_from <= self.recent_frames:
            raise ValueError(
                f"codec mixed: oldest_from={self.oldest_from} must be more than recent_frames={self.recent_frames}"
            )
        for name in TIERS:
            if getattr(self, name) is not None:
                self.codec(name)

    def codec(self, tier: str) -> KVCodec:
        """The codec of a tier."""
        return _tier_codec(getattr(self, tier))

    @property
    def span_frames(self) -> int:
        """The longest span that any tier packs together."""
        return max(self.codec(name).span_frames for name in TIERS if getattr(self, name) is not None)

    def tier(self, region: str, age: int) -> str:
        """``sink``, ``recent``, ``older`` or ``oldest``."""
        if region == "sink":
            return "sink"
        if region == "memory":  # tokens a policy chose or merged from the past: no age of their own, but old
            return "older"
        if age < self.recent_frames:
            return "recent"
        return "oldest" if self.oldest_from is not None and age >= self.oldest_from else "older"

    def encode(self, k: Tensor, v: Tensor, *, region: str = "recent", age: int = 0) -> PackedKV:
        """Pack with the codec of the block's tier; see `Codec.encode`."""
        tier = self.tier(region, age)
        packed = self.codec(tier).encode(k, v)
        return PackedKV(packed.parts, packed.shape, packed.dtype, tier, packed.shared)

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Unpack with the codec that packed; see `Codec.decode`."""
        return self.codec(packed.tier).decode(packed, out)

    def nbytes(self, packed: PackedKV) -> int:
        """Bytes the block holds."""
        return packed.nbytes

    def bytes_per_token(
        self, heads: int, head_dim: int, *, tokens: int = 1560, dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """Bytes of one token of the ``older`` tier, which is where a long history lies."""
        return packed_bytes(self.codec("older"), (1, tokens, heads, head_dim), dtype) / tokens

    def error_bound(self, packed: PackedKV) -> tuple[Tensor, Tensor]:
        """As in `Codec.error_bound`."""
        return self.codec(packed.tier).error_bound(packed)

    def kernel_view(self, packed: PackedKV):
        """As in `Codec.kernel_view`."""
        return self.codec(packed.tier).kernel_view(packed)

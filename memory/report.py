"""What a cache holds, in bytes counted on the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one cache at one moment, and the peak so far."""

    regions: dict[str, int] = field(default_factory=dict)
    """Committed tokens by region, and "current" for the chunk in progress."""
    free: int = 0
    """Slots allocated but empty."""
    state: int = 0
    """Tensors of the policy."""
    rotated: int = 0
    """Rotated keys kept across passes (``shadow``)."""
    scratch: int = 0
    """The layer scratch shared by all layers, and the rotation tables."""
    peak: int = 0
    """Largest ``total`` since the cache was made."""
    frames: int = 0
    """Latent frames held by the bank that holds most."""
    dense: int = 0
    """Bytes of the committed tokens uncompressed in the cache's dtype: what a codec is measured against."""

    @property
    def stored(self) -> int:
        """Everything but scratch."""
        return sum(self.regions.values()) + self.free + self.state + self.rotated

    @property
    def total(self) -> int:
        """Everything reachable from the cache."""
        return self.stored + self.scratch

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, with the totals."""
        return {
            "regions": dict(self.regions),
            "free": self.free,
            "state": self.state,
            "rotated": self.rotated,
            "scratch": self.scratch,
            "stored": self.stored,
            "total": self.total,
            "peak": self.peak,
            "frames": self.frames,
            "dense": self.dense,
        }

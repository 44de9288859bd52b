"""What a cache holds, in bytes counted on the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from streamvid.memory.bank import Bank
    from streamvid.memory.history import History


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


def measure(cache: History) -> MemoryReport:
    """Count what a cache holds now."""
    regions: dict[str, int] = {}
    free = state = rotated = dense = 0
    for bank in cache.all_banks():
        slot = bank.geometry.frame_bytes(bank.num_heads)
        for entry in [*bank.entries, *bank.current]:
            regions[entry.region] = regions.get(entry.region, 0) + entry_bytes(bank, entry)
            if entry.region != "current":
                dense += slot * entry.length // bank.tokens_per_frame
        free += slot * len(bank.free)
        rotated += bank.rotated.nbytes
        held = [*bank.state.values(), *bank.notes.values()]
        state += sum(x.nbytes for x in held if isinstance(x, Tensor))
    kept = sum(x.nbytes for pair in cache.kept.values() for x in pair)
    if kept:
        regions["current"] = regions.get("current", 0) + kept
    scratch = cache.scratch.buffer.nbytes + _table_bytes(cache)
    frames = max(bank.num_frames for bank in cache.all_banks())
    total = sum(regions.values()) + free + state + rotated + scratch
    return MemoryReport(regions, free, state, rotated, scratch, max(cache.peak, total), frames, dense)


def entry_bytes(bank: Bank, entry: Any) -> int:
    """Bytes one entry holds."""
    if entry.packed is not None:
        size = entry.codec.nbytes(entry.packed)
    else:
        size = bank.geometry.frame_bytes(bank.num_heads) * len(entry.slots)
    return size + sum(x.nbytes for x in (entry.positions, entry.count) if x is not None)


def _table_bytes(cache: History) -> int:
    """Rotation tables and biases, each counted once."""
    tensors = list(cache.rope.tensors())
    for view in cache.views.values():
        tensors += [view.table, view.query_table, *([] if view.bias is None else [view.bias])]
    return sum({id(x): x.nbytes for x in tensors}.values())  # by object: shapes without data have no address

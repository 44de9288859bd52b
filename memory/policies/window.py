"""Sliding window with an optional attention sink."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import POSITIONS, PositionName, unified


@dataclass(kw_only=True)
class Window(MemoryPolicy):
    """The first ``sink`` frames and the newest ``size - sink``, the chunk itself included.

    Self-Forcing's ``local_attn_size``/``sink_size`` (abs), LongLive (size 12, sink 3), StreamingLLM (slot), Deep
    Forcing's sink alone (sink_shift), Echo-Infinity's indexing (unified). Eviction is whole frames.

    Deviation from the public loops: what the next chunk of the usual size will not see is dropped when a chunk commits,
    not at the next chunk's first pass. What every chunk of the usual size sees is the same.
    """

    size: int = 21
    """Latent frames a chunk attends to, itself included."""
    sink: int = 0
    """Frames from the start that are never dropped."""
    positions: PositionName = "abs"
    """Temporal positions: abs, slot, sink_shift or unified (memory/rope.py)."""
    newest: int | None = None
    """With positions=unified: the position at which the newest frame stays (default 20, the last one of 21 trained)."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.size < self.sink + chunk_frames:
            raise ValueError(
                f"window: size={self.size} must be at least sink + chunk = {self.sink} + {chunk_frames} latent frames"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"window: positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.newest is not None and self.positions != "unified":
            raise ValueError("window: newest is only used with positions=unified")
        if self.positions == "unified" and self.size > self._newest + 1:
            raise ValueError(
                f"window: positions=unified needs size <= newest + 1 = {self._newest + 1}, got {self.size}"
            )

    @property
    def _newest(self) -> int:
        return 20 if self.newest is None else self.newest

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.size

    def reach(self) -> int | None:
        return self.size

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        visible = bank.newest(self.size - (chunk.count - chunk.skip), keep="sink")
        if self.positions == "unified":
            times, query = unified(visible, chunk, self._newest)
        else:
            times, query = POSITIONS[self.positions](visible, chunk)
        return Plan(visible, times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        bank.keep(bank.newest(self.size - chunk.next_count, keep="sink"))

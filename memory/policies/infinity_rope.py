"""Infinity-RoPE: a short window at slot positions, flushed at a prompt change, with a gap in time at a scene cut."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import slot

CUT = "cut"


@dataclass(kw_only=True)
class InfinityRope(MemoryPolicy):
    """The first ``sink`` and the newest frames of a window of ``size``, numbered 0, 1, 2, ... in read order.

    Infinity-RoPE (block-relativistic RoPE, 2025): positions never leave the trained range, so a stream has no end. Its
    flush at a prompt change is the transition ``flush:2`` of a stream, which keeps the sink and the two newest frames.
    After a scene cut the next chunk is placed at ``cut_at`` instead of directly behind its window: the model reads the
    gap as a cut while the subject stays visible through the sink; the chunk after it is placed as usual.

    Deviation: keys are stored un-rotated and turned at reading; the published code keeps the sink rotated at 0.
    """

    size: int = 6
    """Latent frames a chunk attends to, itself included."""
    sink: int = 1
    """Frames from the start that are never dropped."""
    cut_at: int = 45
    """Temporal position of the first frame of the chunk after a scene cut."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.size < self.sink + chunk_frames:
            raise ValueError(
                f"infinity_rope: size={self.size} must be at least sink + chunk = {self.sink} + {chunk_frames} latent "
                "frames"
            )
        if self.cut_at < self.size:
            raise ValueError(
                f"infinity_rope: cut_at={self.cut_at} must lie behind the window, at {self.size} or more"
            )

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.size

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        visible = bank.newest(self.size - (chunk.count - chunk.skip), keep="sink")
        times, query = slot(visible, chunk)
        if any(entry.tags.get(CUT) for entry in bank.entries):
            query = tuple(self.cut_at + i for i in range(chunk.count))
        return Plan(visible, times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        for entry in bank.entries:
            entry.tags.pop(CUT, None)
        bank.mark_sink(self.sink)
        bank.keep(bank.newest(self.size - chunk.next_count, keep="sink"))

    def on_cut(self, bank: Bank) -> bool:
        for entry in bank.entries:
            entry.tags[CUT] = True
        return True

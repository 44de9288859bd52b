"""Rolling-Sink: the beginning of the clip, played forwards and backwards, as the history of every later chunk."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan


def ping_pong(frame: int, period: int) -> int:
    """The original shown at absolute frame ``frame``: 0, 1, ..., period - 1, period - 1, ..., 1, 0, 0, 1, ..."""
    step = frame % (2 * period)
    return step if step < period else 2 * period - 1 - step


@dataclass(kw_only=True)
class RollingSink(MemoryPolicy):
    """A window of ``size`` frames of which all but the newest ``genuine`` are frames of the clip's beginning.

    Rolling-Sink (training-free, Self-Forcing weights): a fixed sink stagnates, a sink whose indices and contents move
    with the stream does not. The frame shown at absolute position p, once it is older than the newest ``genuine``, is
    original number ping-pong(p) of the first ``size - genuine``, placed at p. Content cannot evolve far from the
    first seconds, so a prompt change shows little.

    Deviation: keys are un-rotated, so the published replacement of cache contents is only another position for the
    same tokens: ``size + genuine`` frames are held instead of two full caches, and nothing is copied. The published
    block rule (three frames, reversed slices) is the frame rule used here, written out for blocks.
    """

    size: int = 21
    """Latent frames a chunk attends to, itself included."""
    genuine: int = 3
    """Newest committed frames that are shown as they are (published: one chunk)."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.genuine < 1 or self.size < chunk_frames + self.genuine + 1:
            raise ValueError(
                f"rolling_sink: size={self.size} must exceed chunk + genuine = {chunk_frames} + {self.genuine} latent "
                "frames, with genuine at least 1"
            )

    @property
    def _originals(self) -> int:
        return self.size - self.genuine

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self._originals + self.genuine + chunk_frames

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        held = {entry.frames[0]: entry for entry in bank.entries}
        origin = min(held, default=0)
        oldest = max(origin, chunk.start - (self.size - chunk.count))
        visible: list[Entry] = []
        times = []
        for frame in range(oldest, chunk.start):
            shown = frame
            if frame < chunk.start - self.genuine:
                shown = origin + ping_pong(frame - origin, self._originals)
            if shown in held:
                visible.append(held[shown])
                times.append((float(frame),))
        return Plan(visible, times, chunk.frames)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self._originals)
        bank.keep(bank.newest(self._originals + self.genuine, keep="sink"))

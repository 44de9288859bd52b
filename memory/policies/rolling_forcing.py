"""Rolling Forcing (2509.25161): a joint window of chunks at rising noise, an anchor, and a short history."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import Times

JOINT = "joint"
"""Note in ``bank.notes`` by which the sampler says that the chunk it is about to begin is a joint window."""


@dataclass(kw_only=True)
class RollingForcing(MemoryPolicy):
    """What the joint window and the context pass of its oldest chunk see.

    The joint window sees the anchor (the stream's first ``anchor`` frames) right before the kept history, and of the
    history the newest frames that leave room for both; before the anchor exists it sees itself only. The context pass
    sees the newest ``size`` frames, itself included, all at their own positions, the anchor only if the history
    reaches back to it. The joint window is never committed; its caller aborts it.
    """

    size: int = 21
    """Latent frames a pass attends to, its own included."""
    anchor: int = 3
    """Frames of the first chunk that are never dropped."""

    fusable = False

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.anchor < 1 or self.size < self.anchor + chunk_frames:
            raise ValueError(
                f"rolling_forcing: size={self.size} must be at least anchor + chunk = {self.anchor} + {chunk_frames}"
            )

    def reach(self) -> int | None:
        return self.size

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        if bank.notes.get(JOINT):
            return self._joint(bank, chunk)
        visible = bank.newest(self.size - (chunk.count - chunk.skip), keep="")
        return Plan(visible, [entry.t for entry in visible], chunk.frames)

    def _joint(self, bank: Bank, chunk: Chunk) -> Plan:
        anchor = [entry for entry in bank.entries if entry.region == "sink"]
        room = max(0, self.size - chunk.count - self.anchor)
        history = _newest([entry for entry in bank.entries if entry.region != "sink"], room)
        at = float(chunk.start - sum(e.num_frames for e in [*history, *anchor]))
        times: list[Times] = []
        for entry in anchor:
            times.append(tuple(at + i for i in range(entry.num_frames)))
            at += entry.num_frames
        return Plan([*anchor, *history], [*times, *(entry.t for entry in history)], chunk.frames)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.anchor)
        anchor = [entry for entry in bank.entries if entry.region == "sink"]
        rest = [entry for entry in bank.entries if entry.region != "sink"]
        bank.keep([*anchor, *_newest(rest, self.size - chunk.next_count)])


def _newest(entries: list[Entry], frames: int) -> list[Entry]:
    chosen: list[Entry] = []
    for entry in reversed(entries):
        frames -= entry.num_frames
        if frames < 0:
            break
        chosen.append(entry)
    return chosen[::-1]

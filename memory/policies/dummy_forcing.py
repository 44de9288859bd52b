"""Dummy Forcing: heads that attend almost only to the chunk itself keep one frame of history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.heads import HeadProfile, groups_by_label
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute

LABELS = ("dummy", "sink", "middle")


@dataclass(kw_only=True)
class DummyForcing(MemoryPolicy):
    """Three groups of heads: dummy heads see the newest frame, sink heads the first frames, middle heads the newest.

    Dummy Forcing (training-free). Every group sees the current chunk in full and keeps nothing that it does not see, so
    bytes fall with the number of dummy heads. Without a profile all heads are middle heads: a window without sink.

    Deviations: the published code classifies heads online in an early chunk, here the labels come from a head profile
    (``streamvid profile-heads``), so that storage can be laid out before the stream starts; sink heads also see one
    newest frame, as dummy heads do.
    """

    profile: str | None = None
    """Head profile file with the labels of dummy_forcing; None: all heads are middle heads."""
    sink: int = 3
    """First frames that sink heads keep."""
    size: int = 12
    """Latent frames that middle heads attend to, the chunk included."""

    def __post_init__(self) -> None:
        self._labels = HeadProfile.load(self.profile) if self.profile else None

    @classmethod
    def of(cls, profile: HeadProfile, **settings) -> DummyForcing:
        """The policy with a profile at hand instead of in a file."""
        policy = cls(**settings)
        policy._labels = profile
        return policy

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 1 or self.size <= chunk_frames:
            raise ValueError(
                f"dummy_forcing: needs sink >= 1 and size above the chunk's {chunk_frames} latent frames, got "
                f"sink={self.sink}, size={self.size}"
            )
        if self._labels:
            self._labels.check(geometry)
            self._labels.of("dummy_forcing")

    def groups(self, geometry: KVGeometry) -> Sequence[Sequence[Sequence[int]]] | None:
        if not self._labels:
            return None
        return [groups_by_label(row, LABELS) for row in self._labels.of("dummy_forcing")]

    def _label(self, layer: int, head: int) -> str:
        return self._labels.of("dummy_forcing")[layer][head] if self._labels else "middle"

    def _frames(self, label: str, chunk_frames: int) -> tuple[int, int]:
        """Sink frames and newest frames of history."""
        return {"dummy": (0, 1), "sink": (self.sink, 1), "middle": (0, self.size - chunk_frames)}[label]

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        label = LABELS[group] if self._labels else "middle"
        return sum(self._frames(label, chunk_frames)) + chunk_frames

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        label = self._label(bank.layer, bank.heads[0] if bank.heads else 0)
        sink, newest = self._frames(label, chunk.next_count or chunk.count)
        bank.mark_sink(sink)
        bank.keep(bank.newest(sink + newest, keep="sink"))

"""A constant bias against the past: the logits of all earlier keys are lowered."""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import POSITIONS, PositionName


@dataclass(kw_only=True)
class KVBias(MemoryPolicy):
    """A window whose past keys count ``weight`` times as much as the chunk's own.

    The KV attention bias of the 14B real-time project: ``log(weight)`` is added to the logits of every key that is not
    of the current chunk. Below 1 a chunk follows its prompt more and its past less: less drift, less consistency.
    ``weight`` 1 is the plain window, exactly.

    Deviation: the sink may be left out of it (``spare_sink``); upstream lowers everything.
    """

    weight: float = 0.3
    """Factor on the attention weight of past keys, above 0."""
    size: int = 21
    sink: int = 3
    positions: PositionName = "abs"
    spare_sink: bool = False
    """Leave the sink at full weight."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if not 0 < self.weight <= 1e4:
            raise ValueError(f"kv_bias: weight={self.weight} must be above 0 (1 is no bias)")
        if self.sink < 0 or self.size < self.sink + chunk_frames:
            raise ValueError(
                f"kv_bias: size={self.size} must be at least sink + chunk = {self.sink} + {chunk_frames} latent frames"
            )
        if self.positions == "unified" or self.positions not in POSITIONS:
            raise ValueError(
                f"kv_bias: positions={self.positions!r} is not one of "
                f"{', '.join(name for name in POSITIONS if name != 'unified')}"
            )
        if self.spare_sink and not self.sink:
            raise ValueError("kv_bias: spare_sink needs a sink of at least 1 latent frame")

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.size

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        visible = bank.newest(self.size - (chunk.count - chunk.skip), keep="sink")
        times, query = POSITIONS[self.positions](visible, chunk)
        log = math.log(self.weight)
        bias = [0.0 if self.spare_sink and entry.region == "sink" else log for entry in visible]
        return Plan(visible, times, query, bias=bias if log else None)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        bank.keep(bank.newest(self.size - chunk.next_count, keep="sink"))

"""MemRoPE: everything evicted lives on as two running means, one slow and one quick."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import slot

TRACKS = ("long", "short")


@dataclass(kw_only=True)
class MemRope(MemoryPolicy):
    """Sink, one long-term and one short-term memory frame, and the newest frames, at slot positions.

    MemRoPE (training-free, Self-Forcing weights): the mean of the un-rotated keys and of the values of each eviction is
    blended into both memories, ``e <- rate * mean + (1 - rate) * e``. Both start as the first eviction's mean. Means
    of rotated keys would cancel, which is why un-rotated ones are kept.

    Deviations: the running means are fp32 masters from which the stored frames are rewritten (in the cache's own bf16
    the slow mean never moves); with ``rolling=false`` the queries follow the filled slots until the window is full, so
    that a short stream equals the full cache, where the published code puts them at the window's end from the start.
    """

    size: int = 12
    """Latent frames a chunk attends to, itself and the two memories included."""
    sink: int = 3
    long: float = 0.01
    """Rate of the long-term memory, 0 to 1."""
    short: float = 0.1
    """Rate of the short-term memory, 0 to 1."""
    per_position: bool = False
    """One mean for each place of the grid instead of one for all tokens, repeated over a frame."""
    adaptive: bool = False
    """Scale the short rate of each token by how far the evicted mean lies from it (0.1 to 5 times)."""
    rolling: bool = False
    """Queries at the end of the window from the first chunk on, as published."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.size < self.sink + 2 + chunk_frames + 1:
            raise ValueError(
                f"memrope: size={self.size} must be at least sink + 2 memories + chunk + 1 = "
                f"{self.sink + 3 + chunk_frames} latent frames"
            )
        for name in TRACKS:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memrope: {name}={getattr(self, name)} is not between 0 and 1")

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.size

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        side = [entry for entry in bank.entries if entry.region == "side"]
        room = self.size - len(side) - (chunk.count - chunk.skip)
        shown = {id(entry) for entry in [*bank.newest(room, keep="sink"), *side]}
        visible = [entry for entry in bank.entries if id(entry) in shown]
        times, query = slot(visible, chunk)
        if self.rolling:
            query = tuple(float(self.size - chunk.count + i) for i in range(chunk.count))
        return Plan(visible, times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        side = [entry for entry in bank.entries if entry.region == "side"]
        if not side and bank.num_frames + chunk.next_count <= self.size:
            return
        kept = bank.newest(self.size - len(TRACKS) - chunk.next_count, keep="sink")
        shown = {id(entry) for entry in [*kept, *side]}
        evicted = [entry for entry in bank.entries if id(entry) not in shown]
        if not evicted:
            return
        means = [self._mean(bank, part) for part in zip(*map(bank.read, evicted), strict=True)]
        bank.drop(evicted)
        self._blend(bank, means, fresh=not side)
        self._store(bank, side)

    def _mean(self, bank: Bank, parts: tuple[Tensor, ...]) -> Tensor:
        """fp32 ``[b, tokens per frame | 1, group heads, d]``."""
        frames = torch.cat([part.float() for part in parts], dim=1)
        if not self.per_position:
            return frames.mean(dim=1, keepdim=True)
        return frames.unflatten(1, (-1, bank.tokens_per_frame)).mean(dim=1)

    def _blend(self, bank: Bank, means: list[Tensor], *, fresh: bool) -> None:
        for track in TRACKS:
            for name, mean in zip("kv", means, strict=True):
                key = f"{track}_{name}"
                if fresh:
                    bank.state[key] = mean.clone()
                    continue
                old = bank.state[key]
                rate: float | Tensor = getattr(self, track)
                if self.adaptive and track == "short":
                    distance = (mean - old).norm(dim=-1, keepdim=True)
                    scale = distance / distance.mean(dim=1, keepdim=True).clamp_min(1e-6)
                    rate = (self.short * scale.clamp(0.1, 5.0)).clamp(max=1.0)
                bank.state[key] = old + rate * (mean - old)

    def _store(self, bank: Bank, side: list[Entry]) -> None:
        sinks = sum(entry.region == "sink" for entry in bank.entries)
        for number, track in enumerate(TRACKS):
            k, v = (
                bank.state[f"{track}_{name}"]
                .to(bank.geometry.dtype)
                .expand(-1, bank.tokens_per_frame, -1, -1)
                for name in "kv"
            )
            if side:
                bank.overwrite(side[number], k, v)
            else:
                bank.add(k, v, region="side", t=(0.0,), at=sinks + number)

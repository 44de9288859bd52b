"""InfiniPot-V: a token memory that keeps what has changed (TaR) and what carries large values (VaN)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, store, tokens_of, top


def redundancy(tokens: Tokens, recent: Tensor, columns: int) -> Tensor:
    """Mean cosine of each key with the recent keys at its own place.

    Args:
        tokens: candidates.
        recent: ``[b, frames, tokens per frame, group heads, d]`` un-rotated keys of the newest frames.
        columns: tokens in a row of a frame.

    Returns:
        fp32 ``[b, n, group heads]``.
    """
    mean = F.normalize(recent.float(), dim=-1).mean(dim=1)
    place = (tokens.positions[..., 1] * columns + tokens.positions[..., 2]).round().long()
    here = mean.gather(1, place[..., None].expand(-1, -1, -1, mean.shape[-1]))
    return (F.normalize(tokens.k.float(), dim=-1) * here).sum(dim=-1)


def smooth_norm(v: Tensor, grid: tuple[int, int], depth: float) -> Tensor:
    """Value norms, averaged over neighbours: in 3-D, 2-D, 1-D or not at all from the first to the last quarter.

    Args:
        v: ``[b, frames * rows * columns, group heads, d]``.
        depth: layer / (layers - 1), 0 to 1.

    Returns:
        fp32 ``[b, n, group heads]``.
    """
    norm = v.float().norm(dim=-1)
    b, n, heads = norm.shape
    volume = norm.transpose(1, 2).reshape(b, heads, n // (grid[0] * grid[1]), *grid)
    wanted = [(7, 7, 7), (1, 5, 5), (1, 1, 3), (1, 1, 1)][min(int(depth * 4), 3)]
    kernel = tuple(
        min(want, have - 1 + have % 2) for want, have in zip(wanted, volume.shape[2:], strict=True)
    )
    pooled = F.avg_pool3d(
        volume, kernel, stride=1, padding=tuple(size // 2 for size in kernel), count_include_pad=False
    )
    return pooled.reshape(b, heads, n).transpose(1, 2)


@dataclass(kw_only=True)
class TarVan(MemoryPolicy):
    """Sink, a memory of chosen tokens, and the newest frames, at their own positions.

    InfiniPot-V (for video understanding). When frames leave the window, they and the memory compete for ``memory``
    frames' worth of places, for every head alone: a share ``tar`` goes to the tokens least like the newest frames at
    their place, the rest to the largest value norms. No query and no attention matrix is needed.

    Deviations: keys are compared un-rotated; the share for TaR does not include the newest frames, which are always
    kept; value norms are smoothed over the frames that leave together, once, and stay with their token.
    """

    sink: int = 3
    memory: int = 6
    """Frames' worth of tokens."""
    recent: int = 9
    """Newest frames a chunk sees, itself included."""
    tar: float = 0.5
    """Share of the memory given to TaR, 0 to 1."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.memory < 1 or self.recent < chunk_frames + 1:
            raise ValueError(
                "tar_van: needs sink >= 0, memory >= 1 and recent above the chunk's "
                f"{chunk_frames} latent frames, got sink={self.sink}, memory={self.memory}, recent={self.recent}"
            )
        if not 0 <= self.tar <= 1:
            raise ValueError(f"tar_van: tar={self.tar} is not between 0 and 1")

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.sink + self.memory + self.recent

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        memory = [entry for entry in bank.entries if entry.region == "memory"]
        recent = [entry for entry in bank.entries if entry.region == "recent"]
        room = self.sink + self.memory + self.recent - chunk.next_count
        if not memory and bank.num_frames <= room:
            return
        stay = self.recent - chunk.next_count
        leave = recent[: len(recent) - stay]
        if not leave:
            return
        fresh = tokens_of(bank, leave)
        depth = bank.layer / max(bank.geometry.layers - 1, 1)
        van = smooth_norm(fresh.v, bank.geometry.grid, depth)
        candidates = fresh
        if memory:
            candidates = tokens_of(bank, [*memory, *leave])
            van = torch.cat([bank.state["van"], van], dim=1)
        newest = torch.stack([bank.read(entry)[0] for entry in recent[len(recent) - stay :]], dim=1)
        chosen = self._choose(candidates, van, newest, bank)
        kept = candidates.take(chosen)
        bank.state["van"] = van.gather(1, chosen)
        bank.drop(leave)
        sinks = sum(entry.region == "sink" for entry in bank.entries)
        store(
            bank,
            kept,
            memory[0] if memory else None,
            region="memory",
            origin=float(chunk.start),
            at=sinks,
        )

    def _choose(self, candidates: Tokens, van: Tensor, newest: Tensor, bank: Bank) -> Tensor:
        budget = self.memory * bank.tokens_per_frame
        by_change = -redundancy(candidates, newest, bank.geometry.grid[1])
        forced = top(by_change, round(self.tar * budget))
        score = van.scatter(1, forced, torch.inf)
        return top(score, budget)

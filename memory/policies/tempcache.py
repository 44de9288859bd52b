"""TempCache: what has been seen before is merged with its like, and counts for as many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, empty, store, tokens_of


def merge_into(memory: Tokens, new: Tokens, similarity: float, same_place: bool) -> Tokens:
    """Merge each new token with the most similar one held, or put it in an empty or the oldest place.

    The key compared is that of all heads together. A merged token has the mean key and value of its members, the count
    of both, and the newest frame's position.

    Args:
        memory: places, empty ones with count 0; not changed.
        new: no more tokens than places.
        similarity: cosine from which on tokens are merged.
        same_place: compare only tokens at the same row and column.
    """
    b, m, heads, d = memory.k.shape
    flat = [F.normalize(tokens.k.float().flatten(2), dim=-1) for tokens in (new, memory)]
    cosine = flat[0] @ flat[1].transpose(1, 2)
    allowed = (memory.count[:, None, :, 0] > 0).expand_as(cosine)
    if same_place:
        places = [tokens.positions[:, :, 0, 1:] for tokens in (new, memory)]
        allowed = allowed & (places[0][:, :, None] == places[1][:, None]).all(-1)
    best, target = cosine.masked_fill(~allowed, -2.0).max(dim=2)
    merges = best >= similarity

    spare = torch.full_like(target, m)  # a row behind the last place takes what does not belong
    into = torch.where(merges, target, spare)
    sums = [
        _padded(part.float() * memory.count[..., None]).scatter_add_(
            1, _wide(into, heads, d), fresh.float() * new.count[..., None]
        )[:, :m]
        for part, fresh in ((memory.k, new.k), (memory.v, new.v))
    ]
    count = _padded(memory.count).scatter_add_(1, into[..., None].expand(-1, -1, heads), new.count)[:, :m]
    safe = count.clamp_min(1.0)[..., None]
    touched = (count > memory.count)[..., None]
    k, v = (
        torch.where(touched, total / safe, part.float())
        for total, part in zip(sums, (memory.k, memory.v), strict=True)
    )
    positions = _padded(memory.positions).scatter(1, _wide(into, heads, 3), new.positions)[:, :m]

    age = torch.where(count[..., 0] > 0, positions[:, :, 0, 0], torch.full_like(count[..., 0], -torch.inf))
    oldest_first = age.sort(dim=1, stable=True).indices
    rank = ((~merges).cumsum(dim=1) - 1).clamp_min(0)
    at = torch.where(merges, spare, oldest_first.gather(1, rank))
    return Tokens(
        _padded(k).scatter(1, _wide(at, heads, d), new.k.float())[:, :m].to(memory.k.dtype),
        _padded(v).scatter(1, _wide(at, heads, d), new.v.float())[:, :m].to(memory.v.dtype),
        _padded(positions).scatter(1, _wide(at, heads, 3), new.positions)[:, :m],
        _padded(count).scatter(1, at[..., None].expand(-1, -1, heads), new.count)[:, :m],
    )


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)


def _wide(index: Tensor, heads: int, d: int) -> Tensor:
    return index[..., None, None].expand(-1, -1, heads, d)


@dataclass(kw_only=True)
class TempCache(MemoryPolicy):
    """Sink, a memory of merged tokens with counts, and the newest frames, at their own positions.

    TempCache (training-free; thresholds not published). A frame that leaves the window is merged token by token into
    the memory: cosine of un-rotated keys, against the same place or all places. ``m`` equal keys merged are ``m`` keys:
    a token's count adds its logarithm to the logit. A ``similarity`` above 1 never merges: a first-in-first-out
    memory of ``memory`` frames.

    Deviations: exact nearest neighbours instead of hashing; a merged token takes the newest position; the memory has a
    fixed size and forgets the places not touched longest, where the paper lets it grow.
    """

    sink: int = 3
    memory: int = 6
    """Frames' worth of places."""
    recent: int = 9
    """Newest frames a chunk sees, itself included."""
    similarity: float = 0.9
    """Cosine from which on two keys are one; above 1 never."""
    neighbourhood: Literal["place", "all"] = "place"

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.memory < 1 or self.recent < chunk_frames:
            raise ValueError(
                f"tempcache: needs sink >= 0, memory >= 1 and recent >= chunk = {chunk_frames} latent frames, got "
                f"sink={self.sink}, memory={self.memory}, recent={self.recent}"
            )

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.sink + self.memory + self.recent

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        memory = [entry for entry in bank.entries if entry.region == "memory"]
        recent = [entry for entry in bank.entries if entry.region == "recent"]
        leave = recent[: max(0, len(recent) - (self.recent - chunk.next_count))]
        if not leave or (not memory and len(recent) <= self.memory + self.recent - chunk.next_count):
            return
        places = tokens_of(bank, memory) if memory else empty(bank, self.memory * bank.tokens_per_frame)
        for entry in leave:
            places = merge_into(
                places, tokens_of(bank, [entry]), self.similarity, self.neighbourhood == "place"
            )
        bank.drop(leave)
        sinks = sum(entry.region == "sink" for entry in bank.entries)
        store(
            bank,
            places,
            memory[0] if memory else None,
            region="memory",
            origin=float(chunk.start),
            at=sinks,
        )

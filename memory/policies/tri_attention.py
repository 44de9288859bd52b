"""TriAttention: tokens are kept by the attention that future queries may be expected to pay them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.heads import HeadProfile
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, store, tokens_of, top

DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def expectation(tokens: Tokens, now: float, mean: Tensor, modulus: Tensor, temporal: int) -> Tensor:
    """Expected logit of each token over future distances, up to a factor.

    Args:
        tokens: candidates with absolute positions.
        now: frame of the next queries.
        mean: complex ``[heads, d / 2]``, mean un-rotated query.
        modulus: ``[heads, d / 2]``, mean modulus of the same.
        temporal: how many of the pairs turn with time; the others are taken at distance 0.

    Returns:
        fp32 ``[b, n, heads]``: sum over pairs of ``|q| |k| cos(w (age + d) + phase) + (E|q| - |q|) |k|``, mean over d.
    """
    pairs = torch.view_as_complex(tokens.k.float().unflatten(-1, (-1, 2)).contiguous())
    cross = mean[None, None] * pairs.conj()
    rate = torch.zeros(mean.shape[-1], device=pairs.device)
    rate[:temporal] = 10000.0 ** (-torch.arange(temporal, device=pairs.device) / temporal)
    age = now - tokens.positions[..., 0]
    total = torch.zeros_like(age)
    for distance in DISTANCES:
        angle = (age + distance)[..., None] * rate
        total = total + (cross.real * angle.cos() - cross.imag * angle.sin()).sum(-1)
    spread = ((modulus - mean.abs())[None, None] * pairs.abs()).sum(-1)
    return total / len(DISTANCES) + spread


@dataclass(kw_only=True)
class TriAttention(MemoryPolicy):
    """Sink, a memory of the best tokens of every head, and the newest frames, at their own positions.

    TriAttention (for LongLive). The score of a token is the trigonometric expectation of its logit for queries 0 to 128
    frames later, from the mean query of its head (a calibration, here the head profile) and its own key; scores are
    normalised per head. The memory holds ``memory`` frames' worth of tokens, chosen anew whenever frames leave.

    Without a profile the mean query is zero and the largest keys are kept. Deviation: no tie noise; ties go to the
    older token.
    """

    profile: str | None = None
    """Head profile file with the table of tri_attention; None: tokens are kept by the size of their keys."""
    sink: int = 3
    memory: int = 3
    """Frames' worth of tokens."""
    recent: int = 6
    """Newest frames a chunk sees, itself included."""

    def __post_init__(self) -> None:
        self._profile = HeadProfile.load(self.profile) if self.profile else None

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.memory < 1 or self.recent < chunk_frames:
            raise ValueError(
                f"tri_attention: needs sink >= 0, memory >= 1 and recent >= chunk = {chunk_frames} latent frames, got "
                f"sink={self.sink}, memory={self.memory}, recent={self.recent}"
            )
        if self._profile:
            self._profile.check(geometry)
            self._profile.table("tri_attention")

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
        if not leave or (not memory and len(leave) <= self.memory):
            return
        candidates = tokens_of(bank, [*memory, *leave])
        score = self._score(bank, candidates, float(chunk.start + chunk.count))
        kept = candidates.take(top(score, self.memory * bank.tokens_per_frame))
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

    def _score(self, bank: Bank, tokens: Tokens, now: float) -> Tensor:
        half, device = bank.geometry.head_dim // 2, tokens.k.device
        if self._profile is None:
            mean = torch.zeros(bank.num_heads, half, dtype=torch.complex64, device=device)
            modulus = torch.ones(bank.num_heads, half, device=device)
        else:
            table = self._profile.table("tri_attention")
            rows = list(bank.heads) if bank.heads is not None else slice(None)
            real, imag, modulus = (
                torch.tensor(table[name][bank.layer], device=device)[rows]
                for name in ("real", "imag", "modulus")
            )
            mean = torch.complex(real, imag)
        score = expectation(tokens, now, mean, modulus, half - 2 * (half // 3))
        centred = score - score.mean(dim=1, keepdim=True)
        return centred / centred.square().mean(dim=1, keepdim=True).sqrt().clamp_min(math.ulp(1.0))

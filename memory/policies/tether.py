"""TetherCache: a memory of frames chosen by attention and spread in time (GRAB), corrected on entry (TAME)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan, Seen
from streamvid.memory.rope import slot


def scores(logits: Tensor, t: Tensor, diversity: float, temperature: float = 1.0) -> Tensor:
    """Attention plus temporal diversity of candidate frames.

    Args:
        logits: fp32 ``[b, n]``, mean logit of each candidate.
        t: fp32 ``[b, n]``, the frame each came from.

    Returns:
        fp32 ``[b, n]``: ``a + diversity * max(0, 1 - max_j exp(-|t_i - t_j| / sigma) a_j)``, j other than i.
    """
    a = (logits / temperature).softmax(dim=-1)
    extent = t.amax(dim=1) - t.amin(dim=1) + 1
    sigma = (0.5 * extent).clamp_min(1.0)[:, None, None]
    near = torch.exp(-(t[:, :, None] - t[:, None, :]).abs() / sigma) * a[:, None, :]
    near = near * (1 - torch.eye(t.shape[1], device=t.device))
    return a + diversity * (1 - near.amax(dim=-1)).clamp_min(0)


def tame(x: Tensor, trusted: Tensor, strength: float) -> Tensor:
    """Pull the statistics of ``x`` towards those of ``trusted``, per item, head and channel (``[b, n, h, d]``)."""
    x32, trusted = x.float(), trusted.float()
    mean, std = x32.mean(1, keepdim=True), x32.std(1, keepdim=True, correction=0).clamp_min(1e-6)
    to_mean, to_std = (
        trusted.mean(1, keepdim=True),
        trusted.std(1, keepdim=True, correction=0).clamp_min(1e-6),
    )
    return ((1 - strength) * x32 + strength * (to_std * (x32 - mean) / std + to_mean)).to(x.dtype)


@dataclass(kw_only=True)
class Tether(MemoryPolicy):
    """Sink, a memory of chosen frames and the newest frames, at slot positions.

    TetherCache (training-free, Self-Forcing weights). When a chunk commits, the frames that had left its view compete
    with the memory: mean attention of the clean chunk's un-rotated queries, plus ``diversity`` in time. Frames newly
    admitted are edited towards the statistics of sink and memory (``edit``; 0 leaves them as they are).

    Deviations: statistics are taken for each batch item alone (published: over the batch); the mean logit of a frame
    is computed from one mean query and one mean key, which is the same number.
    """

    sink: int = 3
    memory: int = 14
    """Frames of the memory."""
    recent: int = 4
    """Newest frames a chunk sees, itself included."""
    diversity: float = 0.35
    edit: float = 0.35
    """Strength of the edit, 0 to 1."""
    temperature: float = 1.0

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or self.memory < 1 or self.recent < chunk_frames:
            raise ValueError(
                f"tether: needs sink >= 0, memory >= 1 and recent >= chunk = {chunk_frames} latent frames, got "
                f"sink={self.sink}, memory={self.memory}, recent={self.recent}"
            )
        if not 0 <= self.edit <= 1 or self.diversity < 0 or self.temperature <= 0:
            raise ValueError(
                f"tether: needs 0 <= edit <= 1, diversity >= 0 and temperature > 0, got edit={self.edit}, "
                f"diversity={self.diversity}, temperature={self.temperature}"
            )

    @property
    def _total(self) -> int:
        return self.sink + self.memory + self.recent

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self._total + chunk_frames

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        count = chunk.count - chunk.skip
        if bank.num_frames + count <= self._total:
            visible = list(bank.entries)
        else:
            chosen = [entry for entry in bank.entries if entry.region != "recent"]
            room = max(self.recent - count, 0)
            recent = [entry for entry in bank.entries if entry.region == "recent"]
            visible = chosen + recent[len(recent) - room :]
        times, query = slot(visible, chunk)
        return Plan(visible, times, query)

    def observe(self, bank: Bank, seen: Seen) -> None:
        if seen.stage == "context":
            bank.notes["query"] = seen.q.float().mean(dim=1)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        memory = [entry for entry in bank.entries if entry.region == "memory"]
        recent = [entry for entry in bank.entries if entry.region == "recent"]
        if memory:
            old = [entry for entry in recent if entry.frames[0] < chunk.start]
            left = old[: max(0, len(old) - max(self.recent - (chunk.count - chunk.skip), 0))]
            if left and "query" in bank.notes:
                self._update(bank, memory, left)
            bank.drop(left)
        elif bank.num_frames + chunk.next_count > self._total:
            memory = recent[: self.memory]
            for entry in memory:
                entry.region = "memory"
            frames = torch.tensor([entry.frames[0] for entry in memory], dtype=torch.float32)
            bank.state["frames"] = frames.to(bank.geometry.device).expand(bank.geometry.batch, -1).clone()
        recent = [entry for entry in bank.entries if entry.region == "recent"]
        if any(entry.region == "memory" for entry in bank.entries):
            bank.drop(recent[: max(0, len(recent) - self.recent)])

    def _update(self, bank: Bank, memory: list[Entry], left: list[Entry]) -> None:
        """Choose the memory anew from itself and the frames that left; per batch item, without host sync."""
        size = bank.tokens_per_frame
        held = [torch.cat(part, dim=1) for part in zip(*map(bank.read, memory), strict=True)]
        incoming = [torch.cat(part, dim=1) for part in zip(*map(bank.read, left), strict=True)]
        sinks = [bank.read(entry) for entry in bank.entries if entry.region == "sink"]
        trusted = [torch.cat(part, dim=1) for part in zip(*sinks, tuple(held), strict=True)]
        keys = torch.cat([held[0], incoming[0]], dim=1).unflatten(1, (-1, size))
        means = keys.float().mean(dim=2)
        logits = torch.einsum("bnhd,bhd->bn", means, bank.notes["query"]) / (
            means.shape[2] * means.shape[3] ** 0.5
        )
        new_t = torch.tensor([entry.frames[0] for entry in left], dtype=torch.float32, device=logits.device)
        t = torch.cat([bank.state["frames"], new_t.expand(logits.shape[0], -1)], dim=1)
        order = scores(logits, t, self.diversity, self.temperature).sort(dim=1, descending=True, stable=True)
        chosen = order.indices[:, : len(memory)].sort(dim=1).values
        bank.state["frames"] = t.gather(1, chosen)
        stored = []
        for old, new, trust in zip(held, incoming, trusted, strict=True):
            edited = [tame(part, trust, self.edit) for part in new.split(size, dim=1)]
            pool = torch.cat([old, *edited], dim=1).unflatten(1, (-1, size))
            index = chosen[:, :, None, None, None].expand(-1, -1, *pool.shape[2:])
            stored.append(pool.gather(1, index))
        for number, entry in enumerate(memory):
            bank.overwrite(entry, stored[0][:, number], stored[1][:, number])

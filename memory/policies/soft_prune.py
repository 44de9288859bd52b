"""Soft pruning: frames that matter less shrink to one mean token each instead of being dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.bank import Bank
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, empty, join, raster, store, tokens_of, top


def frame_mean(tokens: Tokens, size: int, grid: tuple[int, int]) -> Tokens:
    """One token for each run of ``size``: the mean of keys turned to their row and column, which counts for all.

    Attention to it equals attention to the mean key repeated over the frame, as the study stores it.
    """
    place = raster((0.0,), grid, tokens.k.device).to(torch.float64)
    table = rope_table(place, tokens.k.shape[-1], torch.complex64)[:, None]
    frames = tokens.k.shape[1] // size
    turned = rotate(tokens.k, table.repeat(frames, *[1] * (table.ndim - 1)))
    k, v = (x.float().unflatten(1, (frames, size)).mean(dim=2).to(x.dtype) for x in (turned, tokens.v))
    positions = tokens.positions[:, ::size].clone()
    positions[..., 1:] = 0
    return Tokens(k, v, positions, tokens.count.unflatten(1, (frames, size)).sum(dim=2))


@dataclass(kw_only=True)
class SoftPrune(MemoryPolicy):
    """Newest frames, the highest-scoring older frames, and one mean token for each of the others.

    The soft-prune rows of the 33-variant KV study (FlowCache-inspired). A frame's score is ``0.7 * change + 0.3 *
    recency``, change being the relative difference of its mean absolute keys and values from the frame before it. Later
    layers keep more, by a factor from 0.75 to 1.25. Combine with a mixed codec to store the kept frames in fewer bits,
    as the study does.

    Deviations: the study scores a frame against its own earlier summary, which is constant for committed frames; a
    frame once shrunk stays shrunk; the newest ``pruned`` mean tokens are held, so that bytes are bounded; the mean is
    one token with a count, not a token repeated over the frame, which is the same attention.
    """

    size: int = 21
    """Latent frames that compete, the chunk itself included; shares are of this."""
    recent: float = 0.25
    """Share of the newest frames kept as they are."""
    keep: float = 0.4
    """Share of older frames kept (the study's important 0.1 and retained 0.3 together)."""
    pruned: int = 64
    """Mean tokens held."""
    hard: bool = False
    """Drop the others instead of shrinking them."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if not (0 < self.recent < 1 and 0 < self.keep < 1 and self.recent + self.keep < 1):
            raise ValueError(
                f"soft_prune: recent and keep are shares whose sum is below 1, got {self.recent} and {self.keep}"
            )
        if self.size < 2 * chunk_frames or self.pruned < chunk_frames:
            raise ValueError(
                f"soft_prune: needs size >= {2 * chunk_frames} and pruned >= {chunk_frames} for chunks of "
                f"{chunk_frames} latent frames, got size={self.size}, pruned={self.pruned}"
            )

    def _shares(self, geometry: KVGeometry, layer: int, chunk_frames: int) -> tuple[int, int]:
        scale = 0.75 + 0.5 * layer / max(geometry.layers - 1, 1)
        return (
            max(round(self.size * self.recent * scale), 1),
            max(round(self.size * self.keep * scale), 1),
        )

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        recent, keep = self._shares(geometry, layer, chunk_frames)
        means = -(-self.pruned // geometry.tokens_per_frame)
        return max(self.size, recent + keep + means + chunk_frames)

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        kept = [entry for entry in bank.entries if entry.region == "memory"]
        means = [entry for entry in bank.entries if entry.region == "pruned"]
        fresh = [entry for entry in bank.entries if entry.region == "recent"]
        if not kept and len(fresh) + chunk.next_count <= self.size:
            return
        recent, keep = self._shares(bank.geometry, bank.layer, chunk.next_count or chunk.count)
        leave = fresh[: max(0, len(fresh) - recent)]
        if not leave or (not kept and len(leave) < keep):
            return
        size = bank.tokens_per_frame
        new = tokens_of(bank, leave)
        change = self._change(new, size)
        frames = new
        if kept:
            frames = join([tokens_of(bank, kept), new])
            change = torch.cat([bank.state["change"], change], dim=1)
        chosen, others = self._divide(frames, change, size, keep, float(chunk.start))
        bank.state["change"] = change.gather(1, chosen)
        survivors = frames.take(_rows(chosen, size, bank.num_heads))
        lost = frames.take(_rows(others, size, bank.num_heads))
        bank.drop(leave)
        origin = float(chunk.start)
        store(bank, survivors, kept[0] if kept else None, region="memory", origin=origin, at=0)
        if not self.hard and others.shape[1]:
            old = tokens_of(bank, means) if means else empty(bank, self.pruned)
            held = join([old, frame_mean(lost, size, bank.geometry.grid)])
            last = Tokens(*(x[:, -self.pruned :] for x in (held.k, held.v, held.positions, held.count)))
            store(bank, last, means[0] if means else None, region="pruned", origin=origin, at=0)

    def _change(self, tokens: Tokens, size: int) -> Tensor:
        """fp32 ``[b, frames]``: relative change of the summary against the frame before; the first one's is 1."""
        summary = torch.cat(
            [x.float().abs().unflatten(1, (-1, size)).mean(dim=(2, 4)) for x in (tokens.k, tokens.v)],
            dim=-1,
        )
        step = (summary[:, 1:] - summary[:, :-1]).norm(dim=-1) / summary[:, :-1].norm(dim=-1).clamp_min(1e-6)
        return torch.cat(
            [torch.ones_like(step[:, :1]) if step.shape[1] else summary[:, :1, 0] * 0 + 1, step], dim=1
        )

    def _divide(
        self, frames: Tokens, change: Tensor, size: int, keep: int, now: float
    ) -> tuple[Tensor, Tensor]:
        """Frame indices ``[b, keep]`` that stay whole and ``[b, rest]`` that do not, both ascending."""
        t = frames.positions[:, ::size, 0, 0]
        span = (now - t.amin(dim=1, keepdim=True)).clamp_min(1.0)
        score = 0.7 * change + 0.3 * (1 - (now - t) / span)
        chosen = top(score, keep)
        rest = change.shape[1] - chosen.shape[1]
        return chosen, top(score.scatter(1, chosen, torch.inf).neg(), rest)


def _rows(frames: Tensor, size: int, heads: int) -> Tensor:
    """Token indices ``[b, n * size, heads]`` of frame indices ``[b, n]``."""
    rows = frames[..., None] * size + torch.arange(size, device=frames.device)
    return rows.flatten(1)[..., None].expand(-1, -1, heads)

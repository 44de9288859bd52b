"""Deep Forcing: a large sink that moves along in time, and a token memory chosen by participation in attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan, Seen
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, raster, store, tokens_of, top

BASE = "sink_base"


def frame_queries(q: Tensor, grid: tuple[int, int]) -> Tensor:
    """fp32 ``[b, frames, heads, d]``: queries of each frame turned to their row and column, summed."""
    size = grid[0] * grid[1]
    place = raster((0.0,), grid, q.device).to(torch.float64)
    table = rope_table(place, q.shape[-1], torch.complex128)[:, None]
    frames = q.shape[1] // size
    return rotate(q, table.repeat(frames, 1, 1)).float().unflatten(1, (frames, size)).sum(dim=2)


def participation(queries: Tensor, times: list[float], tokens: Tokens, origin: float) -> Tensor:
    """Mean logit of each token over the queries and heads, up to a constant.

    Args:
        queries: `frame_queries` of some frames.
        times: the absolute position of each of them.
        tokens: candidates with absolute positions.
        origin: subtracted from all positions, so that large ones stay exact.

    Returns:
        fp32 ``[b, n]``.
    """
    d = queries.shape[-1]
    at = torch.tensor([[t - origin, 0.0, 0.0] for t in times], dtype=torch.float64, device=queries.device)
    total = rotate(queries, rope_table(at, d, torch.complex128)[:, None]).sum(dim=1)
    placed = tokens.positions.to(torch.float64) - torch.tensor(
        [origin, 0.0, 0.0], dtype=torch.float64, device=queries.device
    )
    keys = rotate(tokens.k, rope_table(placed, d, torch.complex128)).float()
    return torch.einsum("bnhd,bhd->bn", keys, total) / (d**0.5 * queries.shape[2])


@dataclass(kw_only=True)
class DeepForcing(MemoryPolicy):
    """Sink, selected tokens and the newest frames in a window of ``size``; the sink is placed right before the rest.

    Deep Forcing (training-free, Self-Forcing weights). When a chunk would make the window overflow, it is compressed to
    ``budget`` frames: the sink, the ``recent`` newest frames (the chunk included) and the tokens of all others with the
    highest sum of logits over the newest queries, the same for all heads of a layer. The sink's temporal position moves
    with every such compression. ``compress=false`` drops the oldest frames instead (deep sink alone).

    ``mode=parity`` selects in the chunk's first noisy pass with its noisy queries, as published. ``mode=stable``
    selects when the chunk before commits, with its clean queries: cheaper, and independent of noise.

    Deviations: the sum of queries of each frame is kept, not the queries; re-indexing of the selected tokens (which the
    published code contains and never reaches) is left out; state starts afresh with every stream.
    """

    size: int = 21
    """Latent frames of the window, the chunk included."""
    sink: int = 10
    budget: int = 16
    """Latent frames after a compression, the chunk included."""
    recent: int = 4
    """Newest frames never compressed, the chunk included."""
    reuse: int = 7
    """Times a token may be selected."""
    compress: bool = True
    mode: Literal["parity", "stable"] = "parity"

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if not 0 <= self.sink < self.size - chunk_frames:
            raise ValueError(
                f"deep_forcing: sink={self.sink} must be below size - chunk = {self.size} - {chunk_frames}"
            )
        if self.compress and not chunk_frames <= self.recent <= 2 * chunk_frames:
            raise ValueError(
                f"deep_forcing: recent={self.recent} must be between one and two chunks of {chunk_frames} latent frames"
            )
        if self.compress and not self.sink + self.recent < self.budget <= self.size:
            raise ValueError(
                f"deep_forcing: needs sink + recent < budget <= size, got {self.sink} + {self.recent}, {self.budget}, "
                f"{self.size}"
            )
        if self.compress and self.reuse < 1:
            raise ValueError(f"deep_forcing: reuse={self.reuse} must be at least 1")

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        return self.size + chunk_frames

    # ---- the view ------------------------------------------------------------------------------------------------

    def _held(self, bank: Bank) -> int:
        memory = sum(entry.length for entry in bank.entries if entry.region == "memory")
        return bank.num_frames + memory // bank.tokens_per_frame

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        count = chunk.count - chunk.skip
        visible, base = list(bank.entries), self._base(bank)
        if self._held(bank) + count > self.size:
            after = (self.budget if self.compress else self.size) - self.sink
            base = chunk.start - after - self.sink
            if not self.compress:
                visible = bank.newest(self.size - count, keep="sink")
        return self._place(visible, base, chunk)

    def _base(self, bank: Bank) -> int:
        return max((entry.tags.get(BASE, 0) for entry in bank.entries), default=0)

    def _place(self, visible: list[Entry], base: int, chunk: Chunk) -> Plan:
        times, query = absolute(visible, chunk)
        if base:
            sinks = iter(range(base, base + self.sink))
            times = [
                tuple(float(next(sinks)) for _ in entry.t) if entry.region == "sink" else t
                for entry, t in zip(visible, times, strict=True)
            ]
        return Plan(visible, times, query)

    def refine(self, bank: Bank, plan: Plan, seen: Seen) -> Plan | None:
        chunk = seen.chunk
        rolls = self._held(bank) + chunk.count - chunk.skip > self.size
        if not self.compress or self.mode != "parity" or not rolls:
            return None
        middle, queries, times = self._middle(bank, chunk), frame_queries(seen.q, bank.geometry.grid), []
        if "queries" in bank.state:
            queries = torch.cat([bank.state["queries"], queries], dim=1)
        queries = queries[:, -self.recent :]
        times = [float(chunk.start + chunk.count - queries.shape[1] + i) for i in range(queries.shape[1])]
        tokens = tokens_of(bank, middle)
        chosen, reuse = self._choose(bank, middle, tokens, participation(queries, times, tokens, times[0]))
        bank.notes["chosen"], bank.notes["reuse"], bank.notes["middle"] = chosen, reuse, middle
        first = sum(entry.length for entry in bank.entries if entry.region == "sink")
        total = sum(entry.length for entry in plan.visible)
        after = first + tokens.k.shape[1]
        device = chosen.device
        index = torch.cat(
            [
                torch.arange(first, device=device).expand(chosen.shape[0], -1),
                chosen + first,
                torch.arange(after, total, device=device).expand(chosen.shape[0], -1),
            ],
            dim=1,
        )
        return replace(plan, select=index)

    def _middle(self, bank: Bank, chunk: Chunk) -> list[Entry]:
        """Entries between the sink and the newest frames that stay whole."""
        rest = [entry for entry in bank.entries if entry.region != "sink"]
        whole = self.recent - (chunk.count - chunk.skip)
        return rest[: len(rest) - whole]

    def _choose(
        self, bank: Bank, middle: list[Entry], tokens: Tokens, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Indices ``[b, n]`` of the tokens that stay, and how often each has been selected."""
        reuse = torch.zeros_like(scores)
        if "reuse" in bank.state and middle and middle[0].region == "memory":
            reuse[:, : middle[0].length] = bank.state["reuse"]
        n = min((self.budget - self.sink - self.recent) * bank.tokens_per_frame, tokens.k.shape[1])
        scores = scores.masked_fill(reuse >= self.reuse, -torch.inf)
        bank.notes["scores"] = scores
        chosen = top(scores, n)
        return chosen, reuse.gather(1, chosen) + 1

    # ---- the context pass ------------------------------------------------------------------------------------------

    def observe(self, bank: Bank, seen: Seen) -> None:
        if seen.stage == "context" and self.compress:
            bank.notes["queries"] = frame_queries(seen.q, bank.geometry.grid)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        count = chunk.count - chunk.skip
        if self._held(bank) > self.size and (self.mode == "parity" or not self.compress):
            after = (self.budget if self.compress else self.size) - self.sink
            self._mark(bank, chunk.start - after - self.sink)
        if not self.compress:
            bank.keep(bank.newest(self.size, keep="sink"))
            return
        if "queries" in bank.notes:
            bank.state["queries"] = bank.notes["queries"]
        if "chosen" in bank.notes:
            self._compress(bank, chunk, bank.notes["middle"], bank.notes["chosen"], bank.notes["reuse"])
        elif self.mode == "stable":
            self._compress_ahead(bank, chunk, count)
        elif self._held(bank) > self.size:  # no noisy pass has chosen: a re-cache; the oldest frames go
            bank.keep(bank.newest(self.size, keep="sink"))

    def _compress_ahead(self, bank: Bank, chunk: Chunk, count: int) -> None:
        """Make room for the next chunk with the queries of this one."""
        ahead = chunk.next_count or count
        if self._held(bank) + ahead <= self.size or "queries" not in bank.notes:
            return
        rest = [entry for entry in bank.entries if entry.region != "sink"]
        middle = rest[: len(rest) - (self.recent - ahead)]
        queries = bank.notes["queries"][:, -self.recent :]
        end = chunk.start + chunk.count
        times = [float(end - queries.shape[1] + i) for i in range(queries.shape[1])]
        tokens = tokens_of(bank, middle)
        chosen, reuse = self._choose(bank, middle, tokens, participation(queries, times, tokens, times[0]))
        self._compress(bank, chunk, middle, chosen, reuse)
        self._mark(bank, end - self.budget)

    def _compress(self, bank: Bank, chunk: Chunk, middle: list[Entry], chosen: Tensor, reuse: Tensor) -> None:
        tokens = tokens_of(bank, middle)
        kept = tokens.take(chosen[..., None].expand(-1, -1, bank.num_heads))
        bank.state["reuse"] = reuse
        bank.drop(middle)
        sinks = sum(entry.region == "sink" for entry in bank.entries)
        store(bank, kept, None, region="memory", origin=float(chunk.start), at=sinks)

    def _mark(self, bank: Bank, base: int) -> None:
        for entry in bank.entries:
            if entry.region == "sink":
                entry.tags[BASE] = base

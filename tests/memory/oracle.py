"""A plain float64 definition of what a cache must answer, and a driver that feeds both the same random chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry

Visible = Callable[[list[int], int, int], tuple[list[tuple[int, float]], list[float]]]
"""(committed frames, first frame of the chunk, its frames) -> [(frame, position)] seen, positions of the queries."""


def positions(times: list[float], grid: tuple[int, int]) -> Tensor:
    """``[len(times) * rows * columns, 3]`` in raster order."""
    t, y, x = torch.meshgrid(
        torch.tensor(times, dtype=torch.float64),
        torch.arange(grid[0], dtype=torch.float64),
        torch.arange(grid[1], dtype=torch.float64),
        indexing="ij",
    )
    return torch.stack([t, y, x], dim=-1).reshape(-1, 3)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention in float64, ``[b, n, h, d]``; ``bias`` broadcastable to ``[b, h, nq, nk]``."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        logits = logits + bias
    return (logits.softmax(-1) @ v).transpose(1, 2)


@dataclass
class Oracle:
    """Everything ever committed, and attention over what ``visible`` says."""

    geometry: KVGeometry
    visible: Visible
    frames: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g = self.geometry
        count = q.shape[1] // g.tokens_per_frame
        seen, queries = self.visible(
            sorted({frame for at, frame in self.frames if at == layer}), first, count
        )
        keys = [self.frames[layer, frame][0] for frame, _ in seen] + [k]
        values = [self.frames[layer, frame][1] for frame, _ in seen] + [v]
        table = rope_table(positions(queries, g.grid), g.head_dim, torch.complex128)[:, None]
        key_table = rope_table(
            positions([t for _, t in seen] + queries, g.grid), g.head_dim, torch.complex128
        )[:, None]
        k_all = rotate(torch.cat(keys, dim=1).double(), key_table)
        return attention(rotate(q.double(), table), k_all, torch.cat(values, dim=1))

    def commit(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        size = self.geometry.tokens_per_frame
        for i in range(k.shape[1] // size):
            rows = slice(i * size, (i + 1) * size)
            self.frames[layer, first + i] = k[:, rows], v[:, rows]


def random_qkv(
    geometry: KVGeometry, frames: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (geometry.batch, frames * geometry.tokens_per_frame, geometry.heads, geometry.head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=geometry.dtype) for _ in range(3))  # type: ignore


def run_chunk(cache: KVCache, frames: int, generator: torch.Generator, oracle: Oracle | None = None) -> float:
    """One noisy pass, one context pass and a commit; returns the largest deviation from the oracle."""
    first = cache.begin_chunk(frames).start
    worst = 0.0
    for stage in ("noisy", "context"):
        if stage == "context":
            cache.begin_context()
        for layer in range(cache.geometry.layers):
            q, k, v = random_qkv(cache.geometry, frames, generator)
            out = cache.attend(layer, q, k, v)
            assert torch.isfinite(out).all()
            if oracle is not None:
                worst = max(worst, (out - oracle.attend(layer, first, q, k, v)).abs().max().item())
                if stage == "context":
                    oracle.commit(layer, first, k, v)
    cache.commit()
    return worst


def windowed(size: int, sink: int, place: str = "abs", newest: int = 20) -> Visible:
    """What a window policy must show, written independently of it."""

    def visible(committed: list[int], first: int, count: int) -> tuple[list[tuple[int, float]], list[float]]:
        kept = committed[:sink]
        rest = committed[sink:]
        room = size - count - len(kept)
        rest = rest[max(0, len(rest) - room) :] if room > 0 else []
        now = list(range(first, first + count))
        order = kept + rest
        if place == "slot":
            return [(frame, i) for i, frame in enumerate(order)], [len(order) + i for i in range(count)]
        if place == "sink_shift":
            start = min(rest + now) - len(kept)
            return [(f, start + i) for i, f in enumerate(kept)] + [(f, f) for f in rest], now
        if place == "unified":
            back = max(0, now[-1] - newest)
            moved = [(f, max(f - back, len(kept)) if back else f) for f in rest]
            return list(enumerate_pairs(kept)) + moved, [t - back for t in now]
        return [(f, f) for f in order], now

    return visible


def enumerate_pairs(frames: list[int]) -> list[tuple[int, float]]:
    return [(frame, i) for i, frame in enumerate(frames)]

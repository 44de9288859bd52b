"""Feeds a cache with random chunks, one policy or another: shared by the tests of memory policies."""

from __future__ import annotations

import torch
from torch import Tensor

from streamvid.memory.cache import KVCache
from streamvid.memory.geometry import KVGeometry

NAN = float("nan")


def geometry(batch: int = 1) -> KVGeometry:
    return KVGeometry(layers=2, heads=4, head_dim=12, grid=(2, 3), batch=batch)


def cache_of(name: str, batch: int = 1, **extra) -> KVCache:
    return KVCache(geometry(batch), name, fill=NAN, **extra)


def draw(g: KVGeometry, seed: int, frames: int = 3) -> list[Tensor]:
    """Queries and keys at random; values tied to keys, so that a mix-up of the two shows."""
    shape = (g.batch, frames * g.tokens_per_frame, g.heads, g.head_dim)
    items = [
        torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(1000 * seed + i))
        for i in range(g.batch)
    ]
    q, k = torch.stack(items, dim=1)
    return [q, k, 2 * k + 1]


def noisy(cache: KVCache, seed: int) -> list[Tensor]:
    return [cache.attend(i, *draw(cache.geometry, seed * 7 + i)) for i in range(cache.geometry.layers)]


def run(cache: KVCache, chunks: range, passes: int = 1) -> list[Tensor]:
    outputs = []
    for chunk in chunks:
        cache.begin_chunk(3)
        for number in range(passes):
            outputs = noisy(cache, 50 * chunk + number)
        cache.begin_context()
        outputs = noisy(cache, 50 * chunk + 49)
        assert all(torch.isfinite(out).all() for out in outputs)
        cache.commit()
    return outputs


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(_known(a[key]), _known(b[key])) for key in a)


def _known(x: Tensor) -> Tensor:
    """Never written storage (NaN) made comparable."""
    if x.is_floating_point() and x.element_size() == 1:
        return x.view(torch.uint8)
    return x.nan_to_num(1e9) if x.is_floating_point() else x

"""Seeded k-means over many independent sets of vectors at once, in tiles of bounded size.

Nothing waits on the device, and nothing depends on the order of atomic additions: sums over a cluster are products
with a one-hot matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

TILE_NUMBERS = 1 << 21
"""Distances held at a time, over all sets, on a CPU (8 MB of fp32); eight times as many on other devices."""


def tiles(n: int, sets: int, centroids: int, device: torch.device) -> Iterator[slice]:
    """Slices of ``n`` tokens so that the distances of one slice stay under `TILE_NUMBERS`."""
    limit = TILE_NUMBERS if device.type == "cpu" else 8 * TILE_NUMBERS
    step = n if device.type == "meta" else max(1, limit // (sets * centroids))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


@lru_cache(maxsize=64)
def _start(n: int, count: int, init: str, seed: int, device: torch.device) -> Tensor:
    """Which tokens are the first centroids; copied to the device once."""
    if init == "random":
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(n, generator=generator)[:count].sort().values.to(device)
    return torch.div(torch.arange(count) * n, count, rounding_mode="floor").to(device)


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each vector, the first one when several are equally near.

    Args:
        x: ``[s, n, d]``, fp32.
        centroids: ``[s, c, d]``, fp32.

    Returns:
        int64 ``[s, n]``.
    """
    # |x - c|^2 without |x|^2, which is the same for all centroids.
    half = centroids.square().sum(-1) / 2
    return torch.baddbmm(half.neg()[:, None], x, centroids.transpose(1, 2)).argmax(-1)


def kmeans(
    x: Tensor, count: int, iterations: int, *, init: Literal["strided", "random"] = "strided", seed: int = 0
) -> Tensor:
    """Lloyd's algorithm, Euclidean.

    Args:
        x: ``[s, n, d]``, any float dtype; ``s`` independent sets.
        count: centroids of each set, at most ``n``.
        iterations: assignments and updates; a cluster that is left empty keeps its centroid.
        init: ``strided`` starts from evenly spaced vectors, ``random`` from a seeded choice (the same for all sets).
        seed: of the random choice.

    Returns:
        Centroids fp32 ``[s, count, d]``.
    """
    sets, n, d = x.shape
    centroids = x.index_select(1, _start(n, count, init, seed, x.device)).float()
    for _ in range(iterations):
        sums = torch.zeros_like(centroids)
        sizes = torch.zeros(sets, count, 1, dtype=torch.float32, device=x.device)
        for tile in tiles(n, sets, count, x.device):
            part = x[:, tile].float()
            ids = assign(part, centroids)
            hot = torch.zeros(sets, part.shape[1], count, dtype=torch.float32, device=x.device)
            hot.scatter_(2, ids[..., None], 1.0)
            sums.baddbmm_(hot.transpose(1, 2), part)
            sizes += hot.sum(1)[..., None]
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    return centroids

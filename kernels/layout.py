"""Where tokens lie: from runs of a cache's view to blocks, with the place and time of each block.

Blocks are cubes of the frame grid, not runs of the raster: 64 raster tokens are a stripe one row high, whose mean key
says little. The tokens themselves stay where they are; a table says which belong to which block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .types import Blocks


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a view."""

    region: str
    """The cache's word; rules know "sink" and "current", all others are history."""
    time: float = 0.0
    """Temporal position of the first frame."""
    frames: int = 1
    """Whole frames in raster order; 0 = loose tokens that have no place on the grid (merged, or a prompt's)."""
    tokens: int = 0
    """Length of a loose run."""


@dataclass(frozen=True)
class Layout:
    """The queries and keys of one attention call."""

    grid: tuple[int, int]
    """Token rows and columns of a frame."""
    query_times: tuple[float, ...]
    """Temporal position of each frame of the queries."""
    keys: tuple[Run, ...]
    """In the order in which the view holds them."""

    @property
    def num_keys(self) -> int:
        size = self.grid[0] * self.grid[1]
        return sum(run.frames * size or run.tokens for run in self.keys)


@dataclass(frozen=True, eq=False)
class Blocking:
    """Blocks of a layout and what selection rules need to know of them. Tensors on one device."""

    queries: Blocks
    keys: Blocks
    query_place: Tensor
    """fp32 ``[query blocks, 3]``: mean time, row and column."""
    key_place: Tensor
    """fp32 ``[key blocks, 3]``; NaN for loose tokens."""
    regions: tuple[str, ...]
    """Of each key block."""
    times: tuple[float, ...]
    """Mean time of each key block, on the host; NaN for loose tokens."""
    cube: tuple[int, int, int]
    grid: tuple[int, int]


def auto_cube(grid: tuple[int, int], frames: int, limit: int = 64) -> tuple[int, int, int]:
    """Frames, rows and columns of a block: at most ``limit`` tokens, dividing the grid where possible, nearly square.

    Whole frames where they fit; else one frame deep, or one chunk where that fills the places better.
    """
    rows, columns = grid
    if rows * columns <= limit:
        return max(1, min(frames, limit // (rows * columns))), rows, columns
    shapes = [
        (depth, height, width)
        for depth in dict.fromkeys((1, min(frames, 4)))
        for height in range(1, rows + 1)
        for width in range(1, columns + 1)
        if depth * height * width <= limit
    ]
    return max(shapes, key=lambda shape: _worth(shape, grid, limit))


def _worth(shape: tuple[int, int, int], grid: tuple[int, int], limit: int) -> float:
    """Share of the places that hold a token, borders included, less a little for elongated blocks."""
    depth, height, width = shape
    count = -(-grid[0] // height) * -(-grid[1] // width)
    return grid[0] * grid[1] * depth / (limit * count) - 0.03 * abs(height - width)


def _cubes(
    frames: list[tuple[float, int]], grid: tuple[int, int], cube: tuple[int, int, int]
) -> list[tuple[list[int], tuple[float, float, float]]]:
    """Tokens and mean place of each cube over frames given as (time, first token)."""
    rows, columns = grid
    found = []
    for f in range(0, len(frames), cube[0]):
        group = frames[f : f + cube[0]]
        time = sum(t for t, _ in group) / len(group)
        for r in range(0, rows, cube[1]):
            height = range(r, min(r + cube[1], rows))
            for c in range(0, columns, cube[2]):
                width = range(c, min(c + cube[2], columns))
                tokens = [start + y * columns + x for _, start in group for y in height for x in width]
                found.append((tokens, (time, (height[0] + height[-1]) / 2, (width[0] + width[-1]) / 2)))
    return found


def _blocks(lists: list[list[int]], num_tokens: int, device: torch.device) -> Blocks:
    """Blocks that hold these tokens; without a table where they are plain runs of one length."""
    size = max(map(len, lists))
    flat = [token for tokens in lists for token in tokens]
    if all(len(tokens) == size for tokens in lists[:-1]) and flat == list(range(num_tokens)):
        return Blocks(num_tokens, size)
    table = torch.full((len(lists), size), -1, dtype=torch.int32)
    for i, tokens in enumerate(lists):
        table[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return Blocks(num_tokens, size, table.to(device))


@lru_cache(maxsize=32)
def blocking(
    layout: Layout,
    cube: tuple[int, int, int],
    loose: int,
    device: torch.device,
    query_cube: tuple[int, int, int] | None = None,
) -> Blocking:
    """The blocks of a layout. Cached, as every layer and chunk of a full window has the same.

    Args:
        layout: what the view holds.
        cube: frames, rows and columns of a block of keys.
        loose: tokens of a block of loose tokens.
        device: where the tensors go.
        query_cube: frames, rows and columns of a block of queries; None = as the keys.

    Raises:
        ValueError: a cube or block that is empty.
    """
    if min(*cube, *(query_cube or cube)) < 1 or loose < 1:
        raise ValueError(f"blocks must hold at least one token, got cube {cube} and {loose} loose tokens")
    size = layout.grid[0] * layout.grid[1]
    times = layout.query_times
    query = _cubes([(time, i * size) for i, time in enumerate(times)], layout.grid, query_cube or cube)
    frames: dict[str, list[tuple[float, int]]] = {}
    key: list[tuple[list[int], tuple[float, float, float], str]] = []
    start = 0
    for run in layout.keys:
        for i in range(run.frames):
            frames.setdefault(run.region, []).append((run.time + i, start + i * size))
        if not run.frames:
            for first in range(start, start + run.tokens, loose):
                stop = min(first + loose, start + run.tokens)
                key.append((list(range(first, stop)), (torch.nan,) * 3, run.region))
        start += run.frames * size or run.tokens
    for region, members in frames.items():
        key += [(tokens, place, region) for tokens, place in _cubes(sorted(members), layout.grid, cube)]
    key.sort(key=lambda block: block[0][0])
    return Blocking(
        queries=_blocks([tokens for tokens, _ in query], len(times) * size, device),
        keys=_blocks([tokens for tokens, _, _ in key], start, device),
        query_place=torch.tensor([place for _, place in query], device=device),
        key_place=torch.tensor([place for _, place, _ in key], device=device),
        regions=tuple(region for _, _, region in key),
        times=tuple(place[0] for _, place, _ in key),
        cube=cube,
        grid=layout.grid,
    )

"""Block-sparse attention over a cache's views: what a selection rule is told, and the maps of the chunk in progress.

A rule (`streamvid.kernels.selectors`) chooses once a chunk, in the first noisy pass of each layer; the map then serves
every pass of the chunk, as the history does not change inside it and the cost of choosing is paid once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from streamvid.kernels.layout import Layout, Run
from streamvid.kernels.selectors import SELECTORS, Selector
from streamvid.kernels.types import BlockMap
from streamvid.memory.spec import build
from streamvid.memory.view import View


def layout_of(view: View, grid: tuple[int, int]) -> Layout:
    """Where the tokens of a view lie, in the order in which attention reads them."""
    size = grid[0] * grid[1]
    runs: list[Run] = []
    pieces = view.pieces
    if view.plan.select is not None:  # chosen tokens have no place on the grid any more
        runs.append(Run("memory", frames=0, tokens=view.committed))
        pieces = [piece for piece in pieces if piece.entry.region == "current"]
    for piece in pieces:
        if piece.entry.positions is None and piece.length == size * len(piece.times):
            runs += [Run(piece.entry.region, time) for time in piece.times]
        else:
            runs.append(Run(piece.entry.region, frames=0, tokens=piece.length))
    return Layout(grid, tuple(view.plan.query_t), tuple(runs))


class SparseMaps:
    """The maps of the chunk in progress, one for each layer and group of heads.

    Args:
        rule: a selection rule, or its text form (``"topk:density=0.25"``).
        grid: token rows and columns of a frame.
    """

    def __init__(self, rule: str | Selector, grid: tuple[int, int]) -> None:
        self.rule = build(rule, SELECTORS, "block selector")
        self._grid = grid
        self._maps: dict[tuple[int, int], BlockMap] = {}

    def map(self, key: tuple[int, int], view: View, q: Tensor, k: Tensor) -> BlockMap | None:
        """The map of a bank, chosen now if this is the chunk's first pass; None where there is no history to skip.

        Args:
            key: layer and group.
            view: what the chunk sees of the bank.
            q: rotated queries of the whole chunk ``[b, n, group heads, d]``.
            k: rotated keys ``[b, n, group heads, d]``.
        """
        if k.shape[1] <= q.shape[1]:
            return None
        if key not in self._maps:
            self._maps[key] = self.rule.select(q, k, layout_of(view, self._grid))
        return self._maps[key]

    def clear(self) -> None:
        """Forget the chunk's maps."""
        self._maps.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for byte accounting."""
        for blocks in self._maps.values():
            yield from blocks.tensors()

"""Block-sparse attention over a cache's views: what a selection rule is told, and the maps of the chunk in progress.

A rule (`streamvid.kernels.selectors`) chooses once a chunk, in the first noisy pass of each layer; the map then serves
every pass of the chunk, as the history does not change inside it and the cost of choosing is paid once. With
``refresh=M`` in the rule it serves M chunks: which blocks of which age matter is much the same from chunk to chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from streamvid.kernels.layout import Blocking, Layout, Run
from streamvid.kernels.selectors import SELECTORS, Selector, forced, to_map
from streamvid.kernels.types import BlockMap
from streamvid.memory.bank import Bank
from streamvid.memory.policy import Chunk
from streamvid.memory.spec import build
from streamvid.memory.view import View

CARRIED = "block_map"
"""Name in ``bank.state`` of the map that goes on to the next chunk: bool ``[b, heads, query blocks, key blocks]``, key
blocks by region and age, so that it means the same when the window has moved on."""


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


@lru_cache(maxsize=32)
def by_age(blocks: Blocking) -> tuple[Tensor, Tensor]:
    """Key blocks by region and time, and where each block is found there: int64 ``[key blocks]`` each.

    Blocks of one frame keep the order of their places; loose tokens have no time and come last in their region.
    """
    keys = [(r, math.inf if math.isnan(t) else t) for r, t in zip(blocks.regions, blocks.times, strict=True)]
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
    device = blocks.key_place.device
    return order.to(device), order.argsort().to(device)


def kept_blocks(map: BlockMap) -> Tensor:
    """The mask of a map, bool ``[b, heads, query blocks, key blocks]``."""
    indices, count = map.indices.long(), map.keys.count
    listed = torch.arange(indices.shape[-1], device=indices.device) < map.counts[..., None]
    mask = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, torch.where(listed, indices, count), True)[..., :count]


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
        self._blockings: dict[tuple[int, int], Blocking] = {}

    def map(self, bank: Bank, chunk: Chunk, view: View, q: Tensor, k: Tensor) -> BlockMap | None:
        """The map of a bank, chosen now if this is the chunk's first pass; None where there is no history to skip.

        Args:
            bank: of a layer and group.
            chunk: in progress.
            view: what the chunk sees of the bank.
            q: rotated queries of the whole chunk ``[b, n, group heads, d]``.
            k: rotated keys ``[b, n, group heads, d]``.
        """
        if k.shape[1] <= q.shape[1]:
            return None
        key = bank.layer, bank.group
        if key not in self._maps:
            layout = layout_of(view, self._grid)
            carried = self._carried(bank, chunk, layout, q)
            self._maps[key] = self.rule.select(q, k, layout) if carried is None else carried
            if self.rule.refresh > 1:
                self._blockings[key] = self.rule.blocking(layout, q.device)
        return self._maps[key]

    def _carried(self, bank: Bank, chunk: Chunk, layout: Layout, q: Tensor) -> BlockMap | None:
        """The map of the chunk before, where one serves several and the window holds as much as then."""
        held = bank.state.get(CARRIED)
        if held is None or chunk.index % self.rule.refresh == 0:
            return None
        blocks = self.rule.blocking(layout, q.device)
        if held.shape[2:] != (blocks.queries.count, blocks.keys.count):
            return None
        always, _ = forced(blocks, self.rule.sink, self.rule.current, self.rule.last)
        return to_map(held[..., by_age(blocks)[1]] | always, blocks)

    def keep(self, banks: Iterable[Bank]) -> None:
        """At commit: leave the chunk's maps for the next one, in the banks, whose state is counted and saved."""
        for bank in banks:
            blocks = self._blockings.get((bank.layer, bank.group))
            if blocks is not None:
                map = self._maps[bank.layer, bank.group]
                bank.state[CARRIED] = kept_blocks(map)[..., by_age(blocks)[0]]

    @staticmethod
    def forget(banks: Iterable[Bank]) -> None:
        """The past has changed otherwise than by going on: the next chunk chooses anew."""
        for bank in banks:
            bank.state.pop(CARRIED, None)

    def clear(self) -> None:
        """Forget the chunk's maps."""
        self._maps.clear()
        self._blockings.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for byte accounting."""
        for blocks in self._maps.values():
            yield from blocks.tensors()

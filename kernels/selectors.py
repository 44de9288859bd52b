"""Which key blocks each block of queries reads: one small dataclass a rule, all in `SELECTORS`.

A rule sees rotated queries and keys and the `Blocking` of the call, and answers with a `BlockMap`. Rules are meant to
run once a chunk and layer, on the first step; the map then serves the other steps and the context pass.
Never waits for the device: sizes are fixed by the layout, counts stay on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .layout import Blocking, Layout, auto_cube, blocking
from .types import BlockMap, Blocks


def pool(x: Tensor, blocks: Blocks) -> Tensor:
    """Mean of each block's tokens, fp32 ``[b, h, blocks, d]``, from ``[b, n, h, d]``."""
    if blocks.table is None and x.shape[1] % blocks.size == 0:
        return x.unflatten(1, (-1, blocks.size)).mean(2, dtype=torch.float32).transpose(1, 2)
    gathered, real = members(x, blocks)
    return (gathered * real[..., None, None]).sum(2).div(real.sum(1)[:, None, None]).transpose(1, 2)


def members(x: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Tokens block by block, fp32 ``[b, blocks, size, h, d]``, and which places are real, ``[blocks, size]``."""
    table = blocks.tokens(x.device)
    real = table >= 0
    gathered = x.index_select(1, table.flatten().clamp_min(0).long()).unflatten(1, table.shape)
    return gathered.float(), real.float()


def scores(q: Tensor, k: Tensor, blocks: Blocking) -> Tensor:
    """Scaled products of block means, fp32 ``[b, h, query blocks, key blocks]``."""
    return pool(q, blocks.queries) @ pool(k, blocks.keys).transpose(-1, -2) * q.shape[-1] ** -0.5


def to_map(kept: Tensor, blocks: Blocking) -> BlockMap:
    """A map from a mask, bool ``[b, h, query blocks, key blocks]``."""
    indices = torch.argsort(~kept, dim=-1, stable=True).to(torch.int32)
    return BlockMap(indices, kept.sum(-1, dtype=torch.int32), blocks.queries, blocks.keys)


def top(score: Tensor, number: int, blocks: Blocking) -> BlockMap:
    """The ``number`` best key blocks of each row; ties go to the lower index."""
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :number]
    indices = order.sort(-1).values.to(torch.int32)
    counts = torch.full(indices.shape[:3], number, dtype=torch.int32, device=score.device)
    return BlockMap(indices, counts, blocks.queries, blocks.keys)


@lru_cache(maxsize=64)
def forced(blocks: Blocking, sink: bool, current: bool, last: int) -> tuple[Tensor, int]:
    """Key blocks that every query reads, as a mask ``[key blocks]``, and how many."""
    past = [time for time, region in zip(blocks.times, blocks.regions, strict=True) if region != "current"]
    newest = max((time for time in past if not math.isnan(time)), default=math.inf)
    # A block is several frames deep: it is among the last frames when any of its frames is.
    reach = newest - last + (blocks.cube[0] - 1) / 2
    kept = [
        (sink and region == "sink")
        or (current and region == "current")
        or (last > 0 and region != "current" and time > reach - (blocks.cube[0] - 1))
        for time, region in zip(blocks.times, blocks.regions, strict=True)
    ]
    return torch.tensor(kept, device=blocks.key_place.device), sum(kept)


@dataclass(kw_only=True)
class Selector:
    """Settings all rules share. Subclasses implement `choose`."""

    cube: tuple[int, ...] = ()
    """Frames, rows and columns of a block of keys, as ``3+5+4``; empty = chosen for at most 64 tokens."""
    queries: tuple[int, ...] = ()
    """The same for queries; empty = ``cube`` if that is given, else the whole chunk up to 1024 tokens, or 128 of it.
    Larger blocks compute faster and choose more coarsely."""
    loose: int = 64
    """Tokens of a block where tokens have no place on the grid."""
    sink: bool = True
    """Always read the sink."""
    current: bool = True
    """Always read the current chunk."""
    last: int = 1
    """Always read this many of the newest committed frames."""
    refresh: int = 1
    """Chunks that one choice serves (block maps carried across chunks); 1 chooses anew in each. Read by the cache."""

    def __post_init__(self) -> None:
        for name, cube in (("cube", self.cube), ("queries", self.queries)):
            if cube and len(cube) != 3:
                raise ValueError(f"{name} needs three numbers (frames+rows+columns), got {cube}")
        if self.last < 0:
            raise ValueError(f"last must be 0 or more frames, got {self.last}")
        if self.refresh < 1:
            raise ValueError(f"refresh must be 1 or more chunks, got {self.refresh}")

    def blocking(self, layout: Layout, device: torch.device) -> Blocking:
        """The blocks this rule works on."""
        frames = len(layout.query_times)
        size = layout.grid[0] * layout.grid[1]
        cube = self.cube or auto_cube(layout.grid, 1 if size <= 64 else frames)
        whole = auto_cube(layout.grid, frames, 1024 if frames * size <= 1024 else 128)
        queries = self.queries or self.cube or whole
        return blocking(layout, tuple(cube), self.loose, device, tuple(queries))  # type: ignore[arg-type]

    def select(self, q: Tensor, k: Tensor, layout: Layout) -> BlockMap:
        """The map of one call.

        Args:
            q: rotated queries ``[b, nq, h, d]``.
            k: rotated keys ``[b, n, h, d]``, laid out as ``layout`` says.
            layout: where the tokens lie.

        Raises:
            ValueError: the layout does not fit the tensors.
        """
        size = layout.grid[0] * layout.grid[1]
        if layout.num_keys != k.shape[1] or len(layout.query_times) * size != q.shape[1]:
            raise ValueError(
                f"layout of {len(layout.query_times) * size} queries and {layout.num_keys} keys does not fit "
                f"q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        return self.choose(q, k, self.blocking(layout, q.device))

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        raise NotImplementedError

    def _forced(self, blocks: Blocking) -> tuple[Tensor, int]:
        return forced(blocks, self.sink, self.current, self.last)

    def _budget(self, density: float, blocks: Blocking, at_least: int) -> int:
        return min(blocks.keys.count, max(1, at_least, math.ceil(density * blocks.keys.count - 1e-9)))


def _share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")


@dataclass(kw_only=True)
class TopK(Selector):
    """The key blocks with the best pooled scores, the same number for every head and query block."""

    density: float = 0.25
    """Share of the key blocks a query block reads, forced ones included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("density", self.density)

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, count = self._forced(blocks)
        score = scores(q, k, blocks).masked_fill(always, torch.inf)
        return top(score, self._budget(self.density, blocks, count), blocks)


@dataclass(kw_only=True)
class Mass(Selector):
    """The fewest key blocks whose pooled softmax mass reaches ``mass``; heads that look everywhere keep more."""

    mass: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("mass", self.mass)

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, _ = self._forced(blocks)
        return to_map(prefix(scores(q, k, blocks).softmax(-1), self.mass, always), blocks)


def prefix(probability: Tensor, mass: float, always: Tensor) -> Tensor:
    """Mask of the forced blocks, and of the likeliest others until ``mass`` is reached; at least one a row."""
    value, order = torch.sort(probability.masked_fill(always, 2.0), dim=-1, descending=True, stable=True)
    value = probability.gather(-1, order)
    before = value.cumsum(-1) - value
    kept = torch.zeros_like(probability, dtype=torch.bool).scatter(-1, order, before < mass)
    return kept | always


@dataclass(kw_only=True)
class VSA(Selector):
    """Video Sparse Attention's fine branch: top-k of pooled scores, nothing forced.

    Deviation: its coarse branch (attention over block means behind a trained gate) is not computed, as no checkpoint
    we load carries the gate.
    """

    sink: bool = False
    current: bool = False
    last: int = 0
    sparsity: float = 0.75
    """Share of key blocks that are skipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("1 - sparsity", 1 - self.sparsity)

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, count = self._forced(blocks)
        score = scores(q, k, blocks).masked_fill(always, torch.inf)
        return top(score, self._budget(1 - self.sparsity, blocks, count), blocks)


@dataclass(kw_only=True)
class Sparge(Selector):
    """SpargeAttn's first stage: pooled softmax mass, but a block whose tokens differ is never skipped.

    Deviations: a block counts as uniform by the mean cosine of its tokens, as published; the second stage (skipping
    the value product of weak tiles inside the kernel) is not done.
    """

    theta: float = 0.6
    """Mean cosine of a key block's tokens below which its mean is not trusted and the block is always read."""
    mass: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("mass", self.mass)

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, _ = self._forced(blocks)
        unsure = self._mixed(k, blocks.keys)[:, :, None, :]
        score = scores(q, k, blocks).masked_fill(unsure, -torch.inf)
        score = score.masked_fill((score == -torch.inf).all(-1, keepdim=True), 0.0)
        kept = prefix(score.softmax(-1), self.mass, always) | unsure
        kept = kept | self._mixed(q, blocks.queries)[..., None]
        return to_map(kept, blocks)

    def _mixed(self, x: Tensor, blocks: Blocks) -> Tensor:
        """Whether the mean cosine between tokens of a block is at most theta, bool ``[b, h, blocks]``."""
        tokens, real = members(x, blocks)
        unit = torch.nn.functional.normalize(tokens, dim=-1) * real[..., None, None]
        # The mean of the Gram matrix of unit rows is the squared length of their mean.
        mean = unit.sum(2) / real.sum(1)[:, None, None]
        return (mean.square().sum(-1) <= self.theta).transpose(1, 2)


@dataclass(kw_only=True)
class STA(Selector):
    """Sliding tile attention: a fixed window of tiles around the query's, no look at the data.

    Deviation: one window for all heads; the published one searches a window a head offline.
    """

    window: tuple[int, ...] = (6, 3, 3)
    """Tiles in time, rows and columns, the query's own in the middle; an even number reaches further back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window) != 3 or min(self.window) < 1:
            raise ValueError(
                f"window needs three numbers of at least 1 (time+rows+columns), got {self.window}"
            )

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, _ = self._forced(blocks)
        offset = (blocks.key_place - blocks.query_place[:, None]) / torch.tensor(
            blocks.cube, dtype=torch.float32, device=q.device
        )
        back = torch.tensor([size // 2 for size in self.window], device=q.device)
        ahead = torch.tensor([(size - 1) // 2 for size in self.window], device=q.device)
        # Half a tile of slack: border tiles are smaller, so their centres lie nearer.
        near = ((offset >= -back - 0.5) & (offset <= ahead + 0.5)).all(-1)
        kept = (near | always)[None, None].expand(q.shape[0], q.shape[2], -1, -1)
        return to_map(kept, blocks)


@dataclass(kw_only=True)
class Local(Selector):
    """FlashVSR's locality-constrained sparse attention: near blocks of all times compete for one budget a head.

    The bound on distance is what keeps a model from repeating itself at sizes larger than it was trained on.
    Deviation: the budget is a share of the map instead of a multiple of a fixed window count.
    """

    reach: int = 5
    """Blocks to each side, in rows and in columns."""
    density: float = 0.25
    """Share of the whole map that is read, forced blocks included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("density", self.density)

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, count = self._forced(blocks)
        distance = (blocks.key_place - blocks.query_place[:, None])[..., 1:].abs()
        size = torch.tensor(blocks.cube[1:], dtype=torch.float32, device=q.device)
        far = (distance > size * (self.reach + 0.5)).any(-1)
        score = scores(q, k, blocks).masked_fill(far, -torch.inf).softmax(-1)
        score = score.masked_fill(always, torch.inf)
        flat = score.flatten(2)
        rows = blocks.queries.count
        number = self._budget(self.density, blocks, count) * rows
        order = torch.sort(flat, dim=-1, descending=True, stable=True).indices[..., :number]
        kept = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, order, True).view(score.shape)
        return to_map(kept & ((score > 0) | always), blocks)


@dataclass(kw_only=True)
class AnnSA(Selector):
    """Nearest-neighbour attention on blocks: only blocks whose mean has a similar hash compete for the budget.

    The hash is the signs of random projections of the block mean (LSH). Deviation: the published method hashes
    tokens; its parameters are not public, so the defaults are ours.
    """

    bits: int = 16
    radius: int = 6
    """Differing bits up to which a block is a candidate."""
    density: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("density", self.density)
        if not 1 <= self.bits <= 64 or not 0 <= self.radius <= self.bits:
            raise ValueError(f"bits must be 1 to 64 and radius 0 to bits, got {self.bits} and {self.radius}")

    def choose(self, q: Tensor, k: Tensor, blocks: Blocking) -> BlockMap:
        always, count = self._forced(blocks)
        planes = projections(q.shape[-1], self.bits, self.seed, q.device)
        query, key = pool(q, blocks.queries), pool(k, blocks.keys)
        hashes = [torch.where(x @ planes >= 0, 1.0, -1.0) for x in (query, key)]
        differing = (self.bits - hashes[0] @ hashes[1].transpose(-1, -2)) / 2
        score = (query @ key.transpose(-1, -2)).masked_fill(differing > self.radius, -torch.inf)
        score = score.masked_fill(always, torch.inf)
        number = self._budget(self.density, blocks, count)
        order = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :number]
        kept = torch.zeros_like(score, dtype=torch.bool).scatter(-1, order, True)
        best = torch.zeros_like(kept).scatter(
            -1, order[..., :1], True
        )  # a row without candidates reads one block
        return to_map(kept & ((score > -torch.inf) | best), blocks)


@lru_cache(maxsize=16)
def projections(head_dim: int, bits: int, seed: int, device: torch.device) -> Tensor:
    """Random hyperplanes ``[head_dim, bits]``, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, bits, generator=generator).to(device)


SELECTORS: dict[str, type[Selector]] = {
    "topk": TopK,
    "mass": Mass,
    "vsa": VSA,
    "sparge": Sparge,
    "sta": STA,
    "local": Local,
    "annsa": AnnSA,
}

"""From a plan to the keys and values attention reads: order, rotation tables, biases, and the layer's scratch.

A view is resolved once a chunk (`resolve`) and filled at every pass (`View.fill`). When what a chunk sees fills one
contiguous range of slots, values are read in place and only rotated keys need scratch; otherwise both are gathered. The
scratch is shared by all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.kernels.quantise import joined
from streamvid.kernels.rope import GridRope, rope_table, rotate
from streamvid.kernels.types import BlockMap, Blocks, PackedTensor
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.codecs.base import join, joinable
from streamvid.memory.policy import Plan
from streamvid.memory.rope import rebase

UNPACKED_TOGETHER = 1 << 16
"""Numbers unpacked at a time on a CPU, where blocks are smaller than that; elsewhere 256 times as many."""


class Scratch:
    """One buffer from which the tensors of one attention call are cut; grows to the largest call."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, fill: float | None = None) -> None:
        self.buffer = torch.empty(0, dtype=dtype, device=device)
        self._fill, self._at, self.grew = fill, 0, False

    def begin(self) -> None:
        """A new call: everything taken before may be overwritten."""
        self._at, self.grew = 0, False

    def take(self, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape, valid until the next `begin`."""
        need = self._at + math.prod(shape)
        if need > self.buffer.numel():
            self.grew = True
            self.buffer = torch.empty(need, dtype=self.buffer.dtype, device=self.buffer.device)
            if self._fill is not None:
                self.buffer.fill_(self._fill)
        cut = self.buffer[self._at : need].view(shape)
        self._at = need
        return cut


@dataclass
class Piece:
    """A run of tokens of the view that is placed as a whole."""

    entry: Entry
    times: tuple[float, ...]
    bias: float
    slots: tuple[int, ...]
    length: int


@dataclass
class View:
    """A plan made ready for one bank: what each pass of the chunk reads."""

    plan: Plan
    pieces: list[Piece]
    """In the order attention reads them: by slot if ``rows``, else visible entries and then the chunk."""
    rows: tuple[int, int] | None
    """The contiguous row range that holds exactly the view, or None."""
    table: Tensor
    """Key rotations, broadcastable to ``[b, n, group heads, d / 2]``."""
    query_table: Tensor
    bias: Tensor | None
    """fp32 additive logits ``[n]``, ``[group heads, n]`` or ``[b, group heads, n]``."""
    base: int
    committed: int
    """Tokens before the current ones where ``rows`` is None (after selection)."""
    shadow: bool
    blocks: BlockMap | None = None
    """Which frames each frame of the chunk reads, where the plan says so."""

    def fill(self, bank: Bank, k: Tensor, v: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[b, n, group heads, d]`` of this pass; ``k, v``: the whole current chunk."""
        if self.rows is not None:
            start, stop = self.rows
            if self.shadow:
                return self._refresh(bank), bank.v[:, start:stop]
            keys = bank.k[:, start:stop]
            return rotate(keys, self.table, out=scratch.take(*keys.shape)), bank.v[:, start:stop]
        shape = (k.shape[0], self.committed + k.shape[1], *k.shape[2:])
        keys, values = scratch.take(*shape), scratch.take(*shape)
        self._gather(bank, keys[:, : self.committed], values[:, : self.committed], scratch)
        keys[:, self.committed :] = k
        values[:, self.committed :] = v
        return rotate(keys, self.table, out=keys), values

    def stored(
        self, k: Tensor, v: Tensor
    ) -> list[tuple[Tensor | PackedTensor, Tensor | PackedTensor, Tensor, Tensor | None]] | None:
        """What a kernel that unpacks and rotates on reading gets instead of `fill`: keys, values, table and bias of the
        packed history and of the current chunk. None where the codec's layout is not one that kernels know, or tokens
        were selected or have positions of their own.

        The entries' codes are joined into one tensor, a quarter (4 bits) of the bytes that unpacking would write.
        """
        committed = self.pieces[: len(self.plan.visible)]
        if (
            self.plan.select is not None
            or self.blocks is not None
            or not committed
            or self.table.ndim != 3
            or self.table.shape[1] != 1
        ):
            return None
        sides: tuple[list[PackedTensor], list[PackedTensor]] = ([], [])
        for piece in committed:
            view = getattr(piece.entry.codec, "kernel_view", None)
            pair = None if view is None else view(piece.entry.packed)
            if pair is None or (sides[0] and not sides[0][0].same_layout(pair[0])):
                return None
            for side, packed in zip(sides, pair, strict=True):
                side.append(packed)
        keys, values = (joined(side) for side in sides)
        table, at = self.table[:, 0], self.committed
        biases = (None, None) if self.bias is None else (self.bias[..., :at], self.bias[..., at:])
        return [(keys, values, table[:at], biases[0]), (k, v, table[at:], biases[1])]

    def _gather(self, bank: Bank, keys: Tensor, values: Tensor, scratch: Scratch) -> None:
        select = self.plan.select
        if select is None:
            _concatenate(bank, self.plan.visible, keys, values)
            return
        total = sum(entry.length for entry in self.plan.visible)
        shape = (keys.shape[0], total, *keys.shape[2:])
        all_keys, all_values = scratch.take(*shape), scratch.take(*shape)
        _concatenate(bank, self.plan.visible, all_keys, all_values)
        index = select[..., None] if select.ndim == 3 else select[..., None, None]
        index = index.expand(keys.shape)
        torch.gather(all_keys, 1, index, out=keys) if keys.is_contiguous() else keys.copy_(
            all_keys.gather(1, index)
        )
        values.copy_(all_values.gather(1, index))

    def _refresh(self, bank: Bank) -> Tensor:
        """The kept rotated keys, after turning those that are new or have moved."""
        assert self.rows is not None
        first, size = self.rows[0], bank.tokens_per_frame
        stale = [
            (slot, time)
            for piece in self.pieces
            for slot, time in zip(piece.slots, piece.times, strict=True)
            if bank.rotated_t[slot] != time - self.base
        ]
        at = 0
        while at < len(stale):
            end = at + 1
            while end < len(stale) and stale[end][0] == stale[end - 1][0] + 1:
                end += 1
            start, stop = stale[at][0] * size, (stale[end - 1][0] + 1) * size
            rotate(
                bank.k[:, start:stop],
                self.table[start - first : stop - first],
                out=bank.rotated[:, start:stop],
            )
            for slot, time in stale[at:end]:
                bank.rotated_t[slot] = time - self.base
            at = end
        return bank.rotated[:, self.rows[0] : self.rows[1]]


def _concatenate(bank: Bank, entries: list[Entry], keys: Tensor, values: Tensor) -> None:
    """Copy or decode entries one after the other; neighbours in storage are copied together."""
    if bank.codec is not None:  # then nothing is in slots
        _decode(entries, keys, values)
        return
    at = 0
    pending: tuple[int, int] | None = None

    def copy(run: tuple[int, int]) -> None:
        stop = at - (run[1] - run[0]), at
        keys[:, stop[0] : stop[1]] = bank.k[:, run[0] : run[1]]
        values[:, stop[0] : stop[1]] = bank.v[:, run[0] : run[1]]

    for entry in entries:
        for run in bank.runs(entry):
            if pending is not None and pending[1] == run[0]:
                pending = (pending[0], run[1])
            else:
                if pending is not None:
                    copy(pending)
                pending = run
            at += run[1] - run[0]
    if pending is not None:
        copy(pending)


def _decode(entries: list[Entry], keys: Tensor, values: Tensor) -> None:
    """Unpack entries one after the other; small neighbours of one layout are unpacked together, which saves calls."""
    at, start = 0, 0
    most = UNPACKED_TOGETHER if keys.device.type == "cpu" else 256 * UNPACKED_TOGETHER
    most //= keys.shape[0] * keys.shape[2] * keys.shape[3]
    while start < len(entries):
        first, stop = entries[start], start + 1
        length = first.length
        while (
            stop < len(entries)
            and entries[stop].codec is first.codec
            and joinable(first.codec, first.packed, entries[stop].packed)
            and length + entries[stop].length <= most
        ):
            length += entries[stop].length
            stop += 1
        packed = first.packed if stop == start + 1 else join([entry.packed for entry in entries[start:stop]])
        first.codec.decode(packed, (keys[:, at : at + length], values[:, at : at + length]))
        at, start = at + length, stop


def resolve(bank: Bank, plan: Plan, rope: GridRope, limit: int, skip: int) -> View:
    """Work out order, tables and biases of a plan.

    Args:
        bank: the bank, with its current entries begun.
        plan: what the policy chose.
        rope: rotation tables of whole frames.
        limit: temporal positions are kept below this by a common shift where possible.
        skip: leading frames of the chunk that are not read.
    """
    biases = plan.bias or [0.0] * len(plan.visible)
    pieces = [
        Piece(entry, times, bias, entry.slots, entry.length)
        for entry, times, bias in zip(plan.visible, plan.t, biases, strict=True)
    ]
    current = [
        Piece(entry, (time,), 0.0, entry.slots, entry.length)
        for entry, time in zip(bank.current, plan.query_t[skip:], strict=True)
    ]
    base = _base(bank, pieces, current, plan, limit)
    rows = None if plan.select is not None else _contiguous(bank, pieces + current)
    ordered = sorted(pieces + current, key=lambda piece: piece.slots[0]) if rows else pieces + current
    table = _table(ordered, rope, base)
    bias = _bias(ordered, rope.device)
    committed = sum(piece.length for piece in pieces)
    if plan.select is not None:
        committed = plan.select.shape[1]
        table, bias = _selected(plan.select, table, bias, sum(piece.length for piece in pieces))
    shadow = (
        bank.shadow and rows is not None and all(p.entry.rope and p.entry.positions is None for p in ordered)
    )
    query_table = rope.table(tuple(t - base for t in plan.query_t))
    blocks = None if plan.sees is None else _frames_seen(bank, plan, pieces, ordered, rope.device)
    return View(plan, ordered, rows, table, query_table, _squeeze(bias), base, committed, shadow, blocks)


def _frames_seen(
    bank: Bank, plan: Plan, pieces: list[Piece], ordered: list[Piece], device: torch.device
) -> BlockMap:
    """``plan.sees`` as a block map: a block is a latent frame, of queries as of keys."""
    assert plan.sees is not None
    size = bank.tokens_per_frame
    if plan.select is not None or any(piece.length != size for piece in ordered):
        raise ValueError("Plan.sees needs entries of one whole frame each and no token selection")
    number = {id(piece): i for i, piece in enumerate(ordered)}
    own = [number[id(piece)] for piece in ordered if not any(piece is past for past in pieces)]
    rows = [sorted([number[id(pieces[i])] for i in seen] + own) for seen in plan.sees]
    width = max(map(len, rows))
    indices = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    heads = bank.num_heads
    return BlockMap(
        indices[None, None].expand(1, heads, -1, -1).contiguous().to(device),
        counts[None, None].expand(1, heads, -1).contiguous().to(device),
        Blocks(len(rows) * size, size),
        Blocks(len(ordered) * size, size),
    )


def _base(bank: Bank, pieces: list[Piece], current: list[Piece], plan: Plan, limit: int) -> int:
    if any(not piece.entry.rope for piece in pieces):
        return 0  # an unrotated key meets rotated queries: their absolute position matters
    times = [t for piece in pieces + current for t in piece.times] + list(plan.query_t)
    return rebase(bank.base, min(times), max(times), limit)


def _contiguous(bank: Bank, pieces: list[Piece]) -> tuple[int, int] | None:
    """The row range the pieces fill exactly, each piece in one ascending run; None if there is no such range."""
    size = bank.tokens_per_frame
    slots: list[int] = []
    for piece in pieces:
        if not piece.slots or piece.length != len(piece.slots) * size:
            return None
        if piece.slots != tuple(range(piece.slots[0], piece.slots[0] + len(piece.slots))):
            return None
        slots += piece.slots
    if not slots or max(slots) - min(slots) + 1 != len(slots) or len(set(slots)) != len(slots):
        return None  # gaps, or an entry shown twice
    return min(slots) * size, (max(slots) + 1) * size


def _table(pieces: list[Piece], rope: GridRope, base: int) -> Tensor:
    if all(piece.entry.positions is None and piece.entry.rope for piece in pieces):
        return rope.table(tuple(t - base for piece in pieces for t in piece.times))
    parts = []
    for piece in pieces:
        if not piece.entry.rope:
            part = torch.ones(1, piece.length, 1, rope.head_dim // 2, dtype=rope.dtype, device=rope.device)
        elif piece.entry.positions is not None:
            placed = piece.entry.positions.to(torch.float64)
            placed = placed + torch.tensor([piece.times[0] - base, 0.0, 0.0], dtype=torch.float64).to(
                placed.device
            )
            part = rope_table(placed, rope.head_dim, rope.dtype)
        else:
            part = rope.table(tuple(t - base for t in piece.times)).unsqueeze(0)
        parts.append(part)
    return _cat(parts)


def _cat(parts: list[Tensor]) -> Tensor:
    batch = max(part.shape[0] for part in parts)
    heads = max(part.shape[2] for part in parts)
    return torch.cat([part.expand(batch, -1, heads, *part.shape[3:]) for part in parts], dim=1)


def _bias(pieces: list[Piece], device: torch.device) -> Tensor | None:
    """``[b | 1, n, heads | 1]`` or None if all are zero."""
    counts = [piece.entry.count for piece in pieces]
    if all(count is None for count in counts) and not any(piece.bias for piece in pieces):
        return None
    parts = []
    for piece, count in zip(pieces, counts, strict=True):
        part = torch.zeros(1, piece.length, 1, device=device) if count is None else count.float().log()
        parts.append(part + piece.bias)
    return _cat(parts)


def _selected(
    select: Tensor, table: Tensor, bias: Tensor | None, committed: int
) -> tuple[Tensor, Tensor | None]:
    """Table and bias after choosing ``select`` of the first ``committed`` tokens."""
    table = table.unsqueeze(0) if table.ndim == 3 else table
    index = select if select.ndim == 3 else select[..., None]

    def choose(x: Tensor) -> Tensor:
        shape = [max(x.shape[0], index.shape[0]), -1, max(x.shape[2], index.shape[2])]
        wide = x.expand(*shape[:1], -1, shape[2], *x.shape[3:])
        idx = index.expand(shape[0], -1, shape[2])
        idx = idx.reshape(*idx.shape, *[1] * (x.ndim - 3)).expand(-1, -1, -1, *x.shape[3:])
        return torch.cat([wide[:, :committed].gather(1, idx), wide[:, committed:]], dim=1)

    return choose(table), None if bias is None else choose(bias)


def _squeeze(bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    bias = bias.transpose(1, 2)  # [b | 1, heads | 1, n]
    if bias.shape[0] > 1:
        return bias
    return bias[0, 0] if bias.shape[1] == 1 else bias[0]

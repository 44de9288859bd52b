"""Block-sparse attention on any device without a kernel: gather the kept blocks, attend densely, put back.

Each (batch item, head, query block) is a problem of its own; those with the same number of blocks go through one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import Dense
from .types import BlockMap

HOST_GATHER = 1 << 19
"""Elements of k gathered at a time on the CPU: 2 MiB stays near the cache, and the allocator keeps it."""
DEVICE_GATHER = 1 << 26
"""The same on other devices."""


def dense_mask(blocks: BlockMap) -> Tensor:
    """The map as a mask, bool ``[b or 1, hg, nq, nk]``: what `reference` takes. For tests and small sizes."""
    device = blocks.indices.device
    listed = torch.arange(blocks.indices.shape[3], device=device) < blocks.counts[..., None]
    safe = blocks.indices.long().masked_fill(~listed, blocks.keys.count)
    kept = torch.zeros(*blocks.counts.shape, blocks.keys.count + 1, dtype=torch.bool, device=device)
    kept = kept.scatter(-1, safe, True)[..., :-1]
    of_query = block_of_token(blocks.queries.tokens(device), blocks.queries.num_tokens)
    of_key = block_of_token(blocks.keys.tokens(device), blocks.keys.num_tokens)
    inside = (of_query >= 0)[:, None] & (of_key >= 0)
    return kept[:, :, of_query.clamp_min(0)][..., of_key.clamp_min(0)] & inside


def block_of_token(table: Tensor, num_tokens: int) -> Tensor:
    """The block of each token, int64 ``[num_tokens]``, -1 for tokens in no block. ``table`` as `Blocks.tokens`."""
    owner = torch.full((num_tokens + 1,), -1, dtype=torch.long, device=table.device)
    rows = torch.arange(table.shape[0], device=table.device)[:, None].expand_as(table)
    owner[table.long().masked_fill(table < 0, num_tokens)] = rows
    return owner[:num_tokens]


@dataclass(frozen=True)
class _Gather:
    """Problems with the same number of keys, as rows of flattened tensors."""

    shape: tuple[int, int, int]
    """Problems, queries of each, keys of each."""
    query_rows: Tensor
    """Rows of ``[b * nq * h]`` to read; any row at places without a token. Not read where ``whole``."""
    key_rows: Tensor
    """Rows of ``[b * n * hg]`` to read."""
    out_rows: Tensor
    """Rows of ``[b * nq * h + 1]`` to write; places without a token go to the last."""
    bias: Tensor | None
    """fp32 ``[problems, keys]``: the map's own bias, and ``-inf`` where there is no key."""
    whole: bool
    """Every head's queries are one block in their own order, and this gather serves all of them."""
    bias_index: Tensor
    """Where each key's own bias is in ``[b * hg * n]``."""

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte accounting."""
        bias = [] if self.bias is None else [self.bias]
        return [self.query_rows, self.key_rows, self.out_rows, self.bias_index, *bias]


def _buckets(counts: Tensor, width: int, row_elements: int) -> Iterator[tuple[int, Tensor]]:
    """Problems that gather the same number of blocks, as (number, ids)."""
    if counts.device.type != "cpu":  # reading the counts would wait for the device: gather all, hide the rest
        step = max(1, DEVICE_GATHER // max(1, width * row_elements))
        for problems in torch.arange(counts.numel(), device=counts.device).split(step):
            yield width, problems
        return
    found: dict[int, list[int]] = {}
    for problem, count in enumerate(counts.flatten().tolist()):
        if count:
            found.setdefault(count, []).append(problem)
    for count, problems in found.items():
        for piece in torch.tensor(problems).split(max(1, HOST_GATHER // (count * row_elements))):
            yield count, piece


def _plan(blocks: BlockMap, batch: int, places: tuple[int, ...], head_dim: int) -> list[_Gather]:
    """Everything about the gathers of a map that does not depend on q, k and v."""
    device, on_host = blocks.indices.device, blocks.indices.device.type == "cpu"
    nq, n, hg, h = blocks.queries.num_tokens, blocks.keys.num_tokens, blocks.indices.shape[1], len(places)
    q_tokens = blocks.queries.tokens(device).long()
    k_tokens = blocks.keys.tokens(device).long()
    holes = bool((k_tokens < 0).any()) if on_host else True
    place = torch.tensor(places, device=device)
    rows = len(q_tokens)
    counts = blocks.counts.index_select(1, place).expand(batch, h, rows)
    plan = []
    for count, problems in _buckets(counts, blocks.indices.shape[3], blocks.keys.size * head_dim):
        item, head, row = problems // (h * rows), problems // rows % h, problems % rows
        at = place[head]
        listed = blocks.indices[item if blocks.indices.shape[0] > 1 else 0, at, row, :count].long()
        absent = None
        if not on_host:
            absent = torch.arange(count, device=device) >= counts.flatten()[problems][:, None]
            listed = listed.masked_fill(absent, 0)
        keys = k_tokens[listed]
        bias = None
        if holes or absent is not None or blocks.bias is not None:
            bias = torch.zeros(keys.shape, device=device).masked_fill(keys < 0, -torch.inf)
            if blocks.bias is not None:
                bias = bias + blocks.bias[at[:, None], listed][..., None]
            if absent is not None:
                bias = bias.masked_fill(absent[..., None], -torch.inf)
            bias = bias.flatten(1)
        keys = keys.flatten(1).clamp_min(0)
        tokens = q_tokens[row]
        query_rows = (item[:, None] * nq + tokens.clamp_min(0)) * h + head[:, None]
        out_rows = query_rows.masked_fill(tokens < 0, batch * nq * h)
        plan.append(
            _Gather(
                shape=(len(problems), tokens.shape[1], keys.shape[1]),
                query_rows=query_rows.flatten(),
                key_rows=((item[:, None] * n + keys) * hg + at[:, None]).flatten(),
                out_rows=out_rows.flatten(),
                bias=bias,
                whole=batch == 1 and len(problems) == h and rows == 1 and blocks.queries.table is None,
                bias_index=(item * hg + at)[:, None] * n + keys,
            )
        )
    return plan


def _keys(gather: _Gather, k_flat: Tensor, v_flat: Tensor) -> list[Tensor]:
    """Gathered keys and values ``[1, keys, problems, d]``: a problem takes the place of a head, so that its bias may
    differ from the others'."""
    problems, _, keys = gather.shape
    return [
        flat.index_select(0, gather.key_rows).view(1, problems, keys, -1).transpose(1, 2)
        for flat in (k_flat, v_flat)
    ]


def _own(gather: _Gather, bias: Tensor | None, batch: int, k: Tensor) -> Tensor | None:
    """The map's bias and the view's, ``[1, problems, keys]``."""
    extra = gather.bias
    if bias is not None:
        own = bias.expand(batch, k.shape[2], -1).reshape(-1)[gather.bias_index]
        extra = own if extra is None else extra + own
    return None if extra is None else extra[None]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    blocks: BlockMap,
    places: tuple[int, ...],
    scale: float,
    dense: Dense,
) -> tuple[Tensor, Tensor]:
    """Attention of each query block to its key blocks.

    Args:
        q: ``[b, nq, h, d]``, the heads of a group.
        k: ``[b, n, hg, d]``, all heads of the view.
        v: like ``k``.
        bias: ``[1 or b, 1 or hg, n]``.
        blocks: the view's map.
        places: for each of the ``h`` heads, its place among the view's ``hg``.
        scale: multiplies ``q . k``.
        dense: the dense backend for one problem after gathering.

    Returns:
        Output ``[b, nq, h, d]`` and log-sum-exp ``[b, h, nq]``; 0 and ``-inf`` where nothing is read.
    """
    b, nq, h, d = q.shape
    plan = blocks.plans.get((b, places))
    if plan is None:
        plan = blocks.plans[b, places] = _plan(blocks, b, places, d)
    k_flat, v_flat = (x.reshape(-1, d) for x in (k, v))
    if len(plan) == 1 and plan[0].whole:
        out, lse = dense(q, *_keys(plan[0], k_flat, v_flat), _own(plan[0], bias, b, k), scale, True)
        assert lse is not None
        return out, lse
    q_flat = q.reshape(-1, d)
    out = q.new_zeros(b * nq * h + 1, d)
    lse = torch.full((b * nq * h + 1,), -torch.inf, device=q.device)
    for gather in plan:
        problems, queries, _ = gather.shape
        gq = q_flat.index_select(0, gather.query_rows).view(1, problems, queries, d).transpose(1, 2)
        part, part_lse = dense(gq, *_keys(gather, k_flat, v_flat), _own(gather, bias, b, k), scale, True)
        assert part_lse is not None
        out.index_copy_(0, gather.out_rows, part[0].transpose(0, 1).reshape(-1, d))
        lse.index_copy_(0, gather.out_rows, part_lse[0].float().reshape(-1))
    return out[:-1].view(b, nq, h, d), lse[:-1].view(b, nq, h).transpose(1, 2)

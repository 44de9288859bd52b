"""Block-sparse attention on any device without a kernel: gather the kept blocks, attend densely, put back.

Each (batch item, head, query block) is a problem of its own; those with the same number of blocks go through one call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .backends import Dense
from .types import BlockMap

MAX_GATHERED = 1 << 26  # elements of k (and of v) gathered at a time where counts cannot be read on the host


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


def _buckets(blocks: BlockMap, counts: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Problems that gather the same number of blocks, as (number, ids)."""
    if counts.device.type == "cpu":
        found: dict[int, list[int]] = {}
        for problem, count in enumerate(counts.flatten().tolist()):
            found.setdefault(count, []).append(problem)
        for count, problems in found.items():
            yield count, torch.tensor(problems)
        return
    width = blocks.indices.shape[3]  # reading the counts would wait for the device: gather all, mask the rest
    step = max(1, MAX_GATHERED // max(1, width * blocks.keys.size * size))
    for problems in torch.arange(counts.numel(), device=counts.device).split(step):
        yield width, problems


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
        bias: ``[1 or hg, n]``.
        blocks: the view's map.
        places: for each of the ``h`` heads, its place among the view's ``hg``.
        scale: multiplies ``q . k``.
        dense: the dense backend for one problem after gathering.

    Returns:
        Output ``[b, nq, h, d]`` and log-sum-exp ``[b, h, nq]``; 0 and ``-inf`` where nothing is read.
    """
    b, nq, h, d = q.shape
    n, hg = k.shape[1:3]
    device = q.device
    q_tokens = blocks.queries.tokens(device).long()
    k_tokens = blocks.keys.tokens(device).long()
    padded = blocks.keys.table is not None or n % blocks.keys.size != 0
    rows = len(q_tokens)
    place = torch.tensor(places, device=device)
    counts = blocks.counts.index_select(1, place).expand(b, h, rows)
    q_flat, k_flat, v_flat = (x.contiguous().view(-1, d) for x in (q, k, v))
    out = torch.zeros_like(q_flat)
    lse = torch.full((b * h * (nq + 1),), -torch.inf, device=device)
    for count, problems in _buckets(blocks, counts, d):
        if count == 0:
            continue
        item, head, row = problems // (h * rows), problems // rows % h, problems % rows
        at = place[head]
        listed = blocks.indices[item if blocks.indices.shape[0] > 1 else 0, at, row, :count].long()
        if device.type != "cpu":
            absent = torch.arange(count, device=device) >= counts.flatten()[problems][:, None]
            listed = listed.masked_fill(absent, 0)
        keys = k_tokens[listed].flatten(1)
        extra = None
        if padded:
            extra = torch.zeros(keys.shape, device=device).masked_fill(keys < 0, -torch.inf)
            keys = keys.clamp_min(0)
        if device.type != "cpu":
            hidden = absent.repeat_interleave(blocks.keys.size, 1)
            extra = torch.zeros(keys.shape, device=device) if extra is None else extra
            extra = extra.masked_fill(hidden, -torch.inf)
        if bias is not None:
            line = bias[at[:, None] if bias.shape[0] > 1 else 0, keys]
            extra = line if extra is None else extra + line
        if blocks.bias is not None:
            line = blocks.bias[at[:, None], listed].repeat_interleave(blocks.keys.size, 1)
            extra = line if extra is None else extra + line
        key_rows = ((item[:, None] * n + keys) * hg + at[:, None]).flatten()
        kept = (len(problems), keys.shape[1], d)
        gk = k_flat.index_select(0, key_rows).view(kept).transpose(0, 1)[None]
        gv = v_flat.index_select(0, key_rows).view(kept).transpose(0, 1)[None]
        tokens = q_tokens[row]
        real = tokens >= 0
        query_rows = (item[:, None] * nq + tokens.clamp_min(0)) * h + head[:, None]
        gq = q_flat.index_select(0, query_rows.flatten()).view(*tokens.shape, d).transpose(0, 1)[None]
        part, part_lse = dense(gq, gk, gv, extra, scale, True)
        assert part_lse is not None
        part = part[0].transpose(0, 1).reshape(-1, d)
        lse_rows = (item[:, None] * h + head[:, None]) * (nq + 1) + torch.where(real, tokens, nq)
        lse.index_copy_(0, lse_rows.flatten(), part_lse[0].float().flatten())
        if blocks.queries.table is None and nq % blocks.queries.size == 0:
            out.index_copy_(0, query_rows.flatten(), part)
        else:  # places without a token go to a row that is thrown away
            spare = torch.where(real, query_rows, out.shape[0]).flatten()
            out = torch.cat([out, out.new_zeros(1, d)]).index_copy_(0, spare, part)[:-1]
    return out.view(b, nq, h, d), lse.view(b, h, nq + 1)[..., :nq].contiguous()

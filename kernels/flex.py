"""Attention through PyTorch's FlexAttention: biases and block maps without a kernel of our own.

Compiled on CUDA; elsewhere it runs uncompiled, with every logit in memory, which is right for tests only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .types import BlockMap


@lru_cache(maxsize=2)
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, **mods: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; ``[b, h, n, d]`` in and out."""
    flex = _flex(q.device.type == "cuda")
    try:
        from torch.nn.attention.flex_attention import AuxRequest
    except ImportError:  # torch before 2.9
        return flex(q, k, v, scale=scale, return_lse=True, **mods)
    out, aux = flex(q, k, v, scale=scale, return_aux=AuxRequest(lse=True), **mods)
    return out, aux.lse


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor]:
    """A rectangular group; arguments as `backends.Dense`."""
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    if bias is None:
        out, lse = _call(qt, kt, vt, scale)
        return out.transpose(1, 2), lse
    wide = bias.expand(q.shape[0], q.shape[2], -1).contiguous()

    def add(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + wide[b, h, column]

    out, lse = _call(qt, kt, vt, scale, score_mod=add)
    gone = ~(wide > -torch.inf).any(-1)[..., None]
    return out.masked_fill(gone[..., None], 0).transpose(1, 2), lse.masked_fill(gone, -torch.inf)


def sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    blocks: BlockMap,
    places: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Block-sparse attention with a ``BlockMask``; arguments as `blocks.attend_blocks`.

    Tokens are laid out block by block first, as FlexAttention knows runs only; places without a token are masked.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = q.device
    q_table, k_table = blocks.queries.tokens(device).long(), blocks.keys.tokens(device).long()
    at = torch.tensor(places, device=device)
    qs = q.index_select(1, q_table.flatten().clamp_min(0)).transpose(1, 2)
    ks, vs = (
        x.index_select(1, k_table.flatten().clamp_min(0)).index_select(2, at).transpose(1, 2) for x in (k, v)
    )
    extra = torch.zeros(q.shape[0], len(places), k_table.numel(), device=device)
    extra = extra.masked_fill((k_table < 0).flatten(), -torch.inf)
    if bias is not None:
        own = bias.expand(q.shape[0], k.shape[2], -1).index_select(1, at)
        extra = extra + own[..., k_table.flatten().clamp_min(0)]
    if blocks.bias is not None:
        extra = extra + blocks.bias.index_select(0, at).repeat_interleave(blocks.keys.size, 1)
    listed = torch.arange(blocks.indices.shape[3], device=device) < blocks.counts[..., None]
    kept = torch.zeros(*blocks.counts.shape, blocks.keys.count + 1, dtype=torch.bool, device=device)
    kept = kept.scatter(-1, blocks.indices.long().masked_fill(~listed, blocks.keys.count), True)[..., :-1]
    kept = kept.index_select(1, at).expand(q.shape[0], -1, -1, -1)
    size_q, size_k = blocks.queries.size, blocks.keys.size

    def inside(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return kept[b, h, row // size_q, column // size_k]

    def add(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + extra[b, h, column]

    # A mask's lists are as wide as there are blocks; a map's may be narrower.
    wide = torch.nn.functional.pad(blocks.indices, (0, blocks.keys.count - blocks.indices.shape[3]))
    mask = BlockMask.from_kv_blocks(
        blocks.counts.index_select(1, at).expand(q.shape[0], -1, -1).contiguous(),
        wide.index_select(1, at).expand(q.shape[0], -1, -1, -1).contiguous(),
        BLOCK_SIZE=(size_q, size_k),
        mask_mod=inside,
        seq_lengths=(q_table.numel(), k_table.numel()),
    )
    packed, packed_lse = _call(qs, ks, vs, scale, block_mask=mask, score_mod=add)
    rows = q_table.flatten()
    real = rows >= 0
    rows = torch.where(real, rows, q.shape[1])
    out = q.new_zeros(q.shape[0], q.shape[1] + 1, *q.shape[2:])
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1] + 1), -torch.inf, device=device)
    nothing = packed_lse.isneginf() | packed_lse.isnan()
    packed = packed.masked_fill(nothing[..., None], 0).to(q.dtype)
    out.index_copy_(1, rows, packed.transpose(1, 2))
    lse.index_copy_(2, rows, packed_lse.float().masked_fill(nothing, -torch.inf))
    return out[:, :-1], lse[..., :-1]

"""Launches of the Triton attention kernel over views. Importable only where Triton is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .configs import Config, config_for
from .quantise import dequantise
from .triton_attention import attention_kernel
from .types import BlockMap, Blocks, KVView, PackedTensor

INTERPRETED = type(attention_kernel).__name__ == "InterpretedFunction"
"""Whether TRITON_INTERPRET=1 was set when Triton was imported: kernels then run on the CPU, slowly."""


def unsupported_head_dim(head_dim: int) -> str:
    """Why the kernel cannot take this head_dim; empty = it can."""
    if head_dim in (32, 64, 128, 256) or (INTERPRETED and head_dim & (head_dim - 1) == 0):
        return ""
    return f"head_dim is {head_dim}, the kernel takes 32, 64, 128 or 256"


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """Compute capability as 10 * major + minor; 80 under the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=256)
def _head_table(heads: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(heads, dtype=torch.int32, device=device)


def _tiled(blocks: Blocks, limit: int, device: torch.device) -> tuple[Blocks, int]:
    """Blocks whose size is a power of two from 16 to ``limit``, and into how many each was cut."""
    if blocks.size > limit:
        parts = -(-blocks.size // limit)
        size = limit
    else:
        parts = 1
        size = max(16, 1 << (blocks.size - 1).bit_length())
    short = parts * size - blocks.size
    if blocks.table is None and not short:
        return Blocks(blocks.num_tokens, size), parts
    table = torch.nn.functional.pad(blocks.tokens(device), (0, short), value=-1)
    return Blocks(blocks.num_tokens, size, table.reshape(-1, size).contiguous()), parts


def fit(blocks: BlockMap, config: Config) -> BlockMap:
    """The same map in blocks that the kernel's tiles can hold; worked out once a map."""
    found = blocks.plans.get(config)
    if found is None:
        found = blocks.plans[config] = _fit(blocks, config)
    return found


def _fit(blocks: BlockMap, config: Config) -> BlockMap:
    device = blocks.indices.device
    queries, q_parts = _tiled(blocks.queries, config.block_m, device)
    keys, k_parts = _tiled(blocks.keys, config.block_n, device)
    indices, counts, bias = blocks.indices, blocks.counts, blocks.bias
    if k_parts > 1:
        steps = torch.arange(k_parts, dtype=torch.int32, device=device)
        indices = (indices[..., None] * k_parts + steps).flatten(-2)
        counts = counts * k_parts
        bias = None if bias is None else bias.repeat_interleave(k_parts, 1)[:, : keys.count]
        if keys.table is None:  # the last block may have been cut into pieces beyond the end
            past = indices >= keys.count
            listed = torch.arange(indices.shape[-1], device=device) < counts[..., None]
            counts = counts - (past & listed).sum(-1, dtype=torch.int32)
    if q_parts > 1:
        indices = indices.repeat_interleave(q_parts, 2)[:, :, : queries.count]
        counts = counts.repeat_interleave(q_parts, 2)[:, :, : queries.count]
    return BlockMap(indices.contiguous(), counts.contiguous(), queries, keys, bias)


def _stored(x: Tensor | PackedTensor, like: Tensor) -> Tensor | PackedTensor:
    """Something the kernel can read: plain rows of its dtype, or codes grouped along the channels."""
    if isinstance(x, PackedTensor):
        return x if x.axis == 3 else dequantise(x).to(like.dtype)
    x = x.to(like.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _pointers(x: Tensor | PackedTensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, bool]]:
    """Data, scale and offset (the data again where there is none), and (bits, group, symmetric)."""
    if not isinstance(x, PackedTensor):
        return x, x, x, (0, x.shape[-1], True)
    scale = x.scale.contiguous()
    zero = scale if x.zero is None else x.zero.contiguous()
    return x.codes, scale, zero, (x.bits, x.group_size, x.zero is None)


def _launch(
    q: Tensor, view: KVView, out: Tensor, lse: Tensor, scale: float, carry: bool, config: Config | None
) -> None:
    """One view; ``out`` and ``lse`` are written in place for the heads it serves."""
    b, nq, num_heads, d = q.shape
    _, n, view_heads, _ = view.k.shape
    k, k_scale, k_zero, (k_bits, k_group, k_symmetric) = _pointers(_stored(view.k, q))
    v, v_scale, v_zero, (v_bits, v_group, v_symmetric) = _pointers(_stored(view.v, q))
    if config is None:
        config = config_for(capability(q.device), d, k_bits, v_bits, view.rope is not None)
    blocks = None if view.blocks is None else fit(view.blocks, config)
    queries = Blocks(nq, config.block_m) if blocks is None else blocks.queries
    keys = Blocks(n, config.block_n) if blocks is None else blocks.keys
    cos, sin = (q, q) if view.rope is None else view.trig()
    bias = None if view.bias is None else view.bias.expand(b, view_heads, n)
    if bias is not None and bias.stride(2) != 1:
        bias = bias.contiguous()
    heads = None if view.heads is None else _head_table(view.heads, q.device)
    wide = max(n * k.stride(1), n * v.stride(1), nq * q.stride(1)) >= 2**31
    attention_kernel[(queries.count, b * view_heads)](
        q, k, v, k_scale, k_zero, v_scale, v_zero, cos, sin,
        q if bias is None else bias,
        q if blocks is None or blocks.bias is None else blocks.bias,
        q if heads is None else heads,
        q if blocks is None else blocks.indices,
        q if blocks is None else blocks.counts,
        q if queries.table is None else queries.table,
        q if keys.table is None else keys.table,
        out, lse,
        nq, n, view_heads, queries.count, keys.count,
        1 if blocks is None else blocks.indices.shape[3],
        0 if blocks is None or blocks.indices.shape[0] == 1 else view_heads * queries.count,
        scale * math.log2(math.e),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *((0, 0) if bias is None else bias.stride()[:2]),
        num_heads,
        D=d, BM=queries.size, BN=keys.size,
        K_BITS=k_bits, K_GROUP=k_group, K_SYMMETRIC=k_symmetric,
        V_BITS=v_bits, V_GROUP=v_group, V_SYMMETRIC=v_symmetric,
        ROPE=view.rope is not None, BIAS=bias is not None,
        BLOCK_BIAS=blocks is not None and blocks.bias is not None,
        HEADS=heads is not None, BLOCKS=blocks is not None,
        Q_TABLE=queries.table is not None, K_TABLE=keys.table is not None,
        CARRY=carry, WIDE=wide, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip


def attend_views(
    q: Tensor, views: Sequence[KVView], scale: float, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of the views, one launch a view, each continuing the softmax of the one before.

    Args:
        q: ``[b, nq, h, d]``.
        views: views with at least one token, in any order.
        scale: multiplies ``q . k``.
        config: tiles; None = tuned or default for the device.

    Returns:
        Output ``[b, nq, h, d]`` in the dtype of ``q``, and log-sum-exp ``[b, h, nq]`` in fp32.

    Raises:
        ValueError: a head_dim the kernel does not take.
    """
    b, nq, h, d = q.shape
    reason = unsupported_head_dim(d)
    if reason:
        raise ValueError(f"attention backend 'triton': {reason}; use another backend")
    q = q if q.stride(-1) == 1 else q.contiguous()
    if len(views) == 1 and views[0].heads is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, h, nq, dtype=torch.float32, device=q.device)
        _launch(q, views[0], out, lse, scale, False, config)
        return out, lse
    out = torch.zeros(
        q.shape, dtype=torch.float32, device=q.device
    )  # (0, -inf) continues as an empty softmax
    lse = torch.full((b, h, nq), -torch.inf, dtype=torch.float32, device=q.device)
    for view in views:
        _launch(q, view, out, lse, scale, True, config)
    return out.to(q.dtype), lse

"""Packing and unpacking in one pass: groups of channels, 8 or 4 bits. Importable only where Triton is installed.

The plain version in `quantise.py` makes several temporaries of the unpacked size; these kernels make none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import PackedTensor


@triton.jit
def pack_kernel(
    x, codes, scale, zero, rows, n, heads, x_sb, x_sn, x_sh,
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program packs one group of ROWS rows. Grid: ``(row tiles, groups)``; a row is one token of one head."""
    HALF: tl.constexpr = GROUP // 2
    LEVELS: tl.constexpr = 2**BITS - 1
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    GROUPS: tl.constexpr = D // GROUP
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    head = row % heads
    token = row // heads % n
    item = row // heads // n
    at = x + item * x_sb + token * x_sn + head * x_sh + group * GROUP
    pair = tl.arange(0, HALF)
    mask = real[:, None]
    even = tl.load(at[:, None] + pair[None, :] * 2, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(at[:, None] + pair[None, :] * 2 + 1, mask=mask, other=0.0).to(tl.float32)
    kind = scale.dtype.element_ty
    if SYMMETRIC:
        reach = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        step = (reach / (CENTRE - 1)).to(kind)
        start = -CENTRE * step.to(tl.float32)
    else:
        low = tl.minimum(tl.min(even, 1), tl.min(odd, 1)).to(kind)
        high = tl.maximum(tl.max(even, 1), tl.max(odd, 1))
        start = low.to(tl.float32)
        step = (tl.maximum(high - start, 0.0) / LEVELS).to(kind)
        tl.store(zero + row * GROUPS + group, low, mask=real)
    tl.store(scale + row * GROUPS + group, step, mask=real)
    width = step.to(tl.float32)
    width = tl.where(width == 0.0, 1.0, width)
    # Adding half and taking the floor rounds halves up, where PyTorch rounds them to even: at most one code apart.
    even = tl.floor((even - start[:, None]) / width[:, None] + 0.5)
    odd = tl.floor((odd - start[:, None]) / width[:, None] + 0.5)
    even = tl.minimum(tl.maximum(even, 0.0), LEVELS * 1.0).to(tl.uint8)
    odd = tl.minimum(tl.maximum(odd, 0.0), LEVELS * 1.0).to(tl.uint8)
    if BITS == 4:
        tl.store(codes + row[:, None] * (D // 2) + group * HALF + pair[None, :], even | (odd << 4), mask=mask)
    else:
        out = codes + row[:, None] * D + group * GROUP + pair[None, :] * 2
        tl.store(out, even, mask=mask)
        tl.store(out + 1, odd, mask=mask)


@triton.jit
def unpack_kernel(
    codes, scale, zero, out, rows, n, heads, o_sb, o_sn, o_sh,
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program unpacks ROWS rows. Grid: ``(row tiles,)``."""
    HALF: tl.constexpr = D // 2
    GROUPS: tl.constexpr = D // GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None]
    pair = tl.arange(0, HALF)
    group = row[:, None] * GROUPS + (pair[None, :] * 2) // GROUP
    step = tl.load(scale + group, mask=mask, other=0.0).to(tl.float32)
    if SYMMETRIC:
        start = step * -(2 ** (BITS - 1))
    else:
        start = tl.load(zero + group, mask=mask, other=0.0).to(tl.float32)
    if BITS == 4:
        both = tl.load(codes + row[:, None] * HALF + pair[None, :], mask=mask, other=0)
        even = both & 15
        odd = both >> 4
    else:
        at = codes + row[:, None] * D + pair[None, :] * 2
        even = tl.load(at, mask=mask, other=0)
        odd = tl.load(at + 1, mask=mask, other=0)
    target = out + row // heads // n * o_sb + row // heads % n * o_sn + row % heads * o_sh
    target = target[:, None] + pair[None, :] * 2
    kind = out.dtype.element_ty
    tl.store(target, (even.to(tl.float32) * step + start).to(kind), mask=mask)
    tl.store(target + 1, (odd.to(tl.float32) * step + start).to(kind), mask=mask)


def packable(head_dim: int, group_size: int, bits: int, axis: int) -> bool:
    """Whether the kernels take this layout: powers of two along the channels."""
    powers = head_dim & (head_dim - 1) == 0 and group_size & (group_size - 1) == 0
    return axis == 3 and bits in (4, 8) and powers and 2 <= group_size <= head_dim


def pack(x: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype) -> PackedTensor:
    """As `quantise.quantise` with ``axis=3``; codes may differ by one where a value lies half-way between two."""
    b, n, h, d = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    codes = torch.empty(b, n, h, d * bits // 8, dtype=torch.uint8, device=x.device)
    scale = torch.empty(b, n, h, d // group_size, dtype=scale_dtype, device=x.device)
    zero = None if symmetric else torch.empty_like(scale)
    rows, tile = b * n * h, 32
    pack_kernel[(triton.cdiv(rows, tile), d // group_size)](
        x, codes, scale, scale if zero is None else zero, rows, n, h, *x.stride()[:3],
        D=d, GROUP=group_size, BITS=bits, SYMMETRIC=symmetric, ROWS=tile, num_warps=4,
    )  # fmt: skip
    return PackedTensor(codes, scale, zero, bits, group_size, 3, (b, n, h, d), x.dtype)


def unpack(packed: PackedTensor, out: Tensor) -> Tensor:
    """As `quantise.dequantise`; ``out`` ``[b, n, h, d]`` with contiguous channels, any other strides."""
    b, n, h, d = packed.shape
    scale = packed.scale.contiguous()
    zero = scale if packed.zero is None else packed.zero.contiguous()
    rows, tile = b * n * h, 16
    unpack_kernel[(triton.cdiv(rows, tile),)](
        packed.codes.contiguous(), scale, zero, out, rows, n, h, *out.stride()[:3],
        D=d, GROUP=packed.group_size, BITS=packed.bits, SYMMETRIC=packed.zero is None, ROWS=tile, num_warps=4,
    )  # fmt: skip
    return out

"""The attention kernel: dense, ragged, block-sparse, paged, quantised and biased keys in one source.

One program owns a block of queries of one head and walks a list of key blocks with an online softmax in base 2.
Everything a call does not use is compiled away. 4-bit tiles and tiles rotated on reading are handled as two
half-width tiles, even and odd channels: on compute capability 8.x re-interleaving them in registers spills kilobytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _affine(codes, scale, zero, rows, cols, valid, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Codes to fp32 values; ``rows + cols`` addresses the scale of each code."""
    step = tl.load(scale + (rows + cols), mask=valid, other=0.0).to(tl.float32)
    if SYMMETRIC:
        values = (codes.to(tl.float32) - 2 ** (BITS - 1)) * step
    else:
        values = codes.to(tl.float32) * step + tl.load(zero + (rows + cols), mask=valid, other=0.0).to(
            tl.float32
        )
    return values


@triton.jit
def _half_tiles(
    x,
    scale,
    zero,
    rows,
    scale_rows,
    half,
    valid,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Even and odd channels in fp32; ``rows`` and ``half`` broadcast to the tile."""
    if BITS == 4:
        codes = tl.load(x + (rows + half), mask=valid, other=0)
        group = (half * 2) // GROUP
        even = _affine(codes & 15, scale, zero, scale_rows, group, valid, BITS, SYMMETRIC)
        odd = _affine(codes >> 4, scale, zero, scale_rows, group, valid, BITS, SYMMETRIC)
    elif BITS == 8:
        group = (half * 2) // GROUP
        even = tl.load(x + (rows + half * 2), mask=valid, other=0)
        odd = tl.load(x + (rows + half * 2 + 1), mask=valid, other=0)
        even = _affine(even, scale, zero, scale_rows, group, valid, BITS, SYMMETRIC)
        odd = _affine(odd, scale, zero, scale_rows, group, valid, BITS, SYMMETRIC)
    else:
        even = tl.load(x + (rows + half * 2), mask=valid, other=0.0).to(tl.float32)
        odd = tl.load(x + (rows + half * 2 + 1), mask=valid, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _whole_tile(
    x,
    scale,
    zero,
    rows,
    scale_rows,
    cols,
    valid,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """All channels, as stored (plain tensors) or in fp32 (8 bits)."""
    if BITS == 8:
        codes = tl.load(x + (rows + cols), mask=valid, other=0)
        tile = _affine(codes, scale, zero, scale_rows, cols // GROUP, valid, BITS, SYMMETRIC)
    else:
        tile = tl.load(x + (rows + cols), mask=valid, other=0.0)
    return tile


@triton.jit
def attention_kernel(
    q, k, v, k_scale, k_zero, v_scale, v_zero, cos, sin, bias, block_bias, heads, indices, counts, q_table, k_table,
    out, lse,
    nq, nk, view_heads, q_blocks, k_blocks, indices_width, indices_batch, scale_log2,
    q_sb, q_sn, q_sh, k_sb, k_sn, k_sh, v_sb, v_sn, v_sh, o_sb, o_sn, o_sh, bias_sb, bias_sh, num_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_SYMMETRIC: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_SYMMETRIC: tl.constexpr,
    ROPE: tl.constexpr, BIAS: tl.constexpr, BLOCK_BIAS: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    Q_TABLE: tl.constexpr, K_TABLE: tl.constexpr, CARRY: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one query block of one head over the keys of one view.

    Grid: (query blocks, batch * heads of the view). ``out`` is ``[b, nq, h, d]`` and ``lse``, natural log,
    ``[b, h, nq]``, over all heads of the call. With CARRY they already hold the result over other views and are continued.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    K_SPLIT: tl.constexpr = (K_BITS == 4) or ROPE
    V_SPLIT: tl.constexpr = V_BITS == 4
    H: tl.constexpr = D // 2
    q_block = tl.program_id(0)
    batch = (tl.program_id(1) // view_heads).to(tl.int64)
    place = tl.program_id(1) % view_heads
    head = place
    if HEADS:
        head = tl.load(heads + place)

    at = q_block * BM + tl.arange(0, BM)
    row = at
    if Q_TABLE:
        row = tl.load(q_table + at)
    real = (row >= 0) & (row < nq)
    row = tl.where(real, row, 0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, D)
    half = tl.arange(0, H)
    q_base = q + batch * q_sb + head * q_sh
    o_base = out + batch * o_sb + head * o_sh
    lse_at = lse + (batch * num_heads + head) * nq + row
    if K_SPLIT:
        q_even = tl.load(q_base + row[:, None] * q_sn + half[None, :] * 2, mask=real[:, None], other=0.0)
        q_odd = tl.load(q_base + row[:, None] * q_sn + half[None, :] * 2 + 1, mask=real[:, None], other=0.0)
    else:
        q_tile = tl.load(q_base + row[:, None] * q_sn + cols[None, :], mask=real[:, None], other=0.0)

    if CARRY:
        m = tl.load(lse_at, mask=real, other=float("-inf")) * LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
    if V_SPLIT:
        if CARRY:
            acc_even = tl.load(
                o_base + row[:, None] * o_sn + half[None, :] * 2, mask=real[:, None], other=0.0
            )
            acc_odd = tl.load(
                o_base + row[:, None] * o_sn + half[None, :] * 2 + 1, mask=real[:, None], other=0.0
            )
        else:
            acc_even = tl.zeros([BM, H], tl.float32)
            acc_odd = tl.zeros([BM, H], tl.float32)
    else:
        if CARRY:
            acc = tl.load(o_base + row[:, None] * o_sn + cols[None, :], mask=real[:, None], other=0.0)
        else:
            acc = tl.zeros([BM, D], tl.float32)

    k_base = k + batch * k_sb + place * k_sh
    v_base = v + batch * v_sb + place * v_sh
    num = k_blocks
    if BLOCKS:
        list_row = batch * indices_batch + place * q_blocks + q_block
        num = tl.load(counts + list_row)
    for i in range(num):
        block = i
        if BLOCKS:
            block = tl.load(indices + list_row * indices_width + i)
        token = block * BN + tl.arange(0, BN)
        if K_TABLE:
            token = tl.load(k_table + token)
        valid = (token >= 0) & (token < nk)
        token = tl.where(valid, token, 0)
        if WIDE:  # offsets beyond 2 ** 31 elements
            token = token.to(tl.int64)
        scale_row = (batch * nk + token) * view_heads + place

        if K_SPLIT:
            even, odd = _half_tiles(
                k_base, k_scale, k_zero, token[None, :] * k_sn, scale_row[None, :] * (D // K_GROUP), half[:, None],
                valid[None, :], K_BITS, K_GROUP, K_SYMMETRIC,
            )  # fmt: skip
            if ROPE:
                angle = token[None, :] * H + half[:, None]
                c = tl.load(cos + angle, mask=valid[None, :], other=0.0)
                s = tl.load(sin + angle, mask=valid[None, :], other=0.0)
                turned = even * c - odd * s
                odd = even * s + odd * c
                even = turned
            z = tl.dot(q_even, even.to(q_even.dtype), input_precision=PRECISION)
            z = tl.dot(q_odd, odd.to(q_odd.dtype), z, input_precision=PRECISION)
        else:
            tile = _whole_tile(
                k_base, k_scale, k_zero, token[None, :] * k_sn, scale_row[None, :] * (D // K_GROUP), cols[:, None],
                valid[None, :], K_BITS, K_GROUP, K_SYMMETRIC,
            )  # fmt: skip
            z = tl.dot(q_tile, tile.to(q_tile.dtype), input_precision=PRECISION)
        z *= scale_log2
        if BIAS:
            z += (
                tl.load(bias + batch * bias_sb + place * bias_sh + token, mask=valid, other=0.0)[None, :]
                * LOG2E
            )
        if BLOCK_BIAS:
            z += tl.load(block_bias + place * k_blocks + block) * LOG2E
        z = tl.where(valid[None, :], z, float("-inf"))

        top = tl.maximum(m, tl.max(z, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(z - safe[:, None])
        fade = tl.exp2(m - safe)
        l = l * fade + tl.sum(p, 1)
        m = top
        if V_SPLIT:
            even, odd = _half_tiles(
                v_base, v_scale, v_zero, token[:, None] * v_sn, scale_row[:, None] * (D // V_GROUP), half[None, :],
                valid[:, None], V_BITS, V_GROUP, V_SYMMETRIC,
            )  # fmt: skip
            p = p.to(q.dtype.element_ty)
            acc_even = tl.dot(p, even.to(p.dtype), acc_even * fade[:, None], input_precision=PRECISION)
            acc_odd = tl.dot(p, odd.to(p.dtype), acc_odd * fade[:, None], input_precision=PRECISION)
        else:
            tile = _whole_tile(
                v_base, v_scale, v_zero, token[:, None] * v_sn, scale_row[:, None] * (D // V_GROUP), cols[None, :],
                valid[:, None], V_BITS, V_GROUP, V_SYMMETRIC,
            )  # fmt: skip
            p = p.to(q.dtype.element_ty)
            acc = tl.dot(p, tile.to(p.dtype), acc * fade[:, None], input_precision=PRECISION)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    tl.store(lse_at, tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2), mask=real)
    o_type = out.dtype.element_ty
    if V_SPLIT:
        o_even = o_base + row[:, None] * o_sn + half[None, :] * 2
        tl.store(o_even, (acc_even / l[:, None]).to(o_type), mask=real[:, None])
        tl.store(o_even + 1, (acc_odd / l[:, None]).to(o_type), mask=real[:, None])
    else:
        o_at = o_base + row[:, None] * o_sn + cols[None, :]
        tl.store(o_at, (acc / l[:, None]).to(o_type), mask=real[:, None])

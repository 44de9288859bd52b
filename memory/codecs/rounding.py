"""Integer codes with one scale per group: the arithmetic that most codecs share.

The layout is `streamvid.kernels.types.PackedTensor`'s, so that a kernel can read the parts as they are: uint8
codes, low nibble (or bit pair) first; symmetric codes are offset by ``2 ** (bits - 1)``; ``zero`` is the float
value of code 0. An integer zero-point clamped to the code range cannot express a group that does not contain 0 and
saturates; the float one has no such limit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_MAX = 65504.0
_E4M3_MAX = 448.0
_HALF_TINY = 2.0**-24
_HALF_ROUNDING = 2.0**-11


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., d]`` below ``2 ** bits`` to ``[..., d * bits / 8]``, first channel in the low bits."""
    step = 8 // bits
    packed = codes[..., 0::step].clone()
    for i in range(1, step):
        packed |= codes[..., i::step] << (bits * i)
    return packed


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`."""
    if bits == 8:
        return packed
    step, mask = 8 // bits, (1 << bits) - 1
    codes = torch.empty(*packed.shape, step, dtype=torch.uint8, device=packed.device)
    for i in range(step):
        torch.bitwise_and(packed >> (bits * i), mask, out=codes[..., i])
    return codes.flatten(-2)


def group_size(wanted: int, head_dim: int, name: str) -> int:
    """The group to use along ``head_dim``: ``wanted``, or the whole head when that is smaller.

    Raises:
        ValueError: the group does not divide ``head_dim``.
    """
    group = min(wanted, head_dim)
    if head_dim % group:
        raise ValueError(
            f"codec {name}: group={wanted} does not divide head_dim={head_dim}; use a divisor, such as "
            f"{next(g for g in range(group, 0, -1) if head_dim % g == 0)}"
        )
    return group


def to_half(scale: Tensor) -> Tensor:
    """A non-negative scale as fp16, never below the range it must cover by more than fp16's own rounding."""
    # Half precision is coarse below 6e-5; the added step makes such scales round up instead of to zero.
    return (scale + _HALF_TINY).clamp_(max=_HALF_MAX).to(torch.float16)


def to_e4m3(scale: Tensor) -> Tensor:
    """A non-negative scale as E4M3, saturating at 448; subnormal results round up instead of to zero."""
    return (scale + 2.0**-10).clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn)


def _by_group(x: Tensor, group: int, axis: int) -> tuple[Tensor, int]:
    """``x [b, n, h, d]`` with the group split off ``axis`` (3, or 1 with the last token repeated), and its dim."""
    if axis == 3:
        return x.unflatten(3, (-1, group)), 4
    missing = -x.shape[1] % group
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1, -1)], dim=1)
    return x.unflatten(1, (-1, group)), 2


def quantise(
    x: Tensor, bits: int, group: int, *, asymmetric: bool, axis: int = 3, clip: float = 1.0
) -> dict[str, Tensor]:
    """Round ``x`` to integer codes.

    Args:
        x: ``[b, n, h, d]``, float.
        bits: 2, 4 or 8.
        group: elements that share a scale: channels of a token (``axis=3``, must divide d) or consecutive tokens of
            a channel (``axis=1``; the last group may be shorter).
        asymmetric: cover the group's own range with all ``2 ** bits`` codes, instead of ``[-absmax, absmax]``
            with ``2 ** bits - 1``.
        clip: share of the range that is covered; what lies outside saturates.

    Returns:
        ``codes`` uint8 ``[b, n, h, d * bits / 8]``, ``scale`` and, when asymmetric, ``zero``, both fp16
        ``[b, n, h, d / group]`` or ``[b, ceil(n / group), h, d]``.
    """
    grouped, dim = _by_group(x, group, axis)
    parts: dict[str, Tensor] = {}
    if asymmetric:
        low, high = grouped.amin(dim, keepdim=True).float(), grouped.amax(dim, keepdim=True).float()
        middle, reach = (low + high) / 2, (high - low) / 2 * clip
        zero = (middle - reach).clamp_(-_HALF_MAX, _HALF_MAX).to(torch.float16)
        # From the rounded zero, so that its rounding does not push the upper end out of range.
        scale = to_half((middle + reach - zero.float()).clamp_(min=0) / (2**bits - 1))
        codes = (grouped - zero.float()).div_(scale.float()).round_().clamp_(0, 2**bits - 1)
        parts["zero"] = zero.squeeze(dim)
    else:
        top = 2 ** (bits - 1) - 1
        absmax = grouped.abs().amax(dim, keepdim=True).float()
        scale = to_half(absmax * (clip / top))
        codes = (grouped / scale.float()).round_().clamp_(-top, top).add_(2 ** (bits - 1))
    parts["scale"] = scale.squeeze(dim)
    whole = codes.to(torch.uint8).flatten(dim - 1, dim)[:, : x.shape[1]]
    parts["codes"] = pack_bits(whole, bits) if bits < 8 else whole.contiguous()
    return parts


def dequantise(parts: dict[str, Tensor], bits: int, group: int, out: Tensor, *, axis: int = 3) -> None:
    """Write what `quantise` stored into ``out`` ``[b, n, h, d]`` (any float dtype, strided in b and n)."""
    codes, scale, zero = parts["codes"], parts["scale"].float(), parts.get("zero")
    values = unpack_bits(codes, bits)
    # Symmetric codes become signed by an exact 8-bit subtraction, which is cheaper than one in floating point.
    values = values if zero is not None else values.view(torch.int8).sub(2 ** (bits - 1))
    zero = None if zero is None else zero.float()
    if axis == 3:
        _scale_into(values.unflatten(3, (-1, group)), scale[..., None], zero, out.unflatten(3, (-1, group)))
        return
    whole = out.shape[1] // group * group
    if whole:
        _scale_into(
            values[:, :whole].unflatten(1, (-1, group)),
            scale[:, : whole // group, None],
            None if zero is None else zero[:, : whole // group],
            out[:, :whole].unflatten(1, (-1, group)),
            zero_dim=2,
        )
    if whole < out.shape[1]:
        tail = None if zero is None else zero[:, -1]
        _scale_into(values[:, whole:], scale[:, -1:], tail, out[:, whole:], zero_dim=1)


def _scale_into(values: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, zero_dim: int = -1) -> None:
    if zero is None:
        torch.mul(values, scale, out=out)
    else:
        # In fp32 up to the last rounding: half-precision sums would lose bits that the codes have.
        out.copy_(torch.addcmul(zero.unsqueeze(zero_dim), values.float(), scale))


def group_bound(parts: dict[str, Tensor], n: int, group: int, bits: int, *, axis: int = 3) -> Tensor:
    """Euclidean error bound ``[b, n, h]`` of unclipped `quantise`: half a step, and the rounding of the numbers."""
    scale, zero = parts["scale"].float(), parts.get("zero")
    # fp16 moves a scale by 2^-11 of itself and so the outermost code by 2^-11 of up to 2^bits steps.
    worst = scale * (0.5 + 2**bits * _HALF_ROUNDING) + _HALF_TINY
    if zero is not None:
        worst = worst + zero.float().abs() * _HALF_ROUNDING
    if axis == 3:
        return (worst.square() * group).sum(-1).sqrt()
    return worst.square().sum(-1).sqrt().repeat_interleave(group, dim=1)[:, :n]


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small table on a device, copied there once."""
    return torch.tensor(values, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return (matrix / size**0.5).to(device=device, dtype=dtype)


def rotate_channels(x: Tensor, block: int) -> Tensor:
    """Multiply each ``block`` of channels (a power of two) by the orthonormal Hadamard matrix; its own inverse."""
    if block == 1:
        return x
    return F.linear(x.unflatten(-1, (-1, block)), _hadamard(block, x.dtype, x.device)).flatten(-2)


def power_of_two(d: int) -> int:
    """The largest power of two that divides ``d``."""
    return d & -d

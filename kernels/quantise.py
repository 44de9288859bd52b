"""Pack a tensor into integer codes with one scale per group, and back.

Plain PyTorch on any device; on CUDA, groups of channels go through one Triton kernel without temporaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import BACKENDS
from .types import PackedTensor


def _fused(device: torch.device, head_dim: int, group_size: int, bits: int, axis: int) -> bool:
    """Whether the Triton kernels should do it. The interpreter is for tests, which call them directly."""
    if device.type != "cuda" or BACKENDS["triton"].missing(device, torch.float32):
        return False
    from .triton_pack import packable

    return packable(head_dim, group_size, bits, axis)


def _grouped(x: Tensor, group_size: int, axis: int) -> Tensor:
    """``[b, n, h, d]`` as ``[b, n, h, d/g, g]`` (axis 3) or ``[b, n/g, g, h, d]`` (axis 1, last group repeated)."""
    b, n, h, d = x.shape
    if axis == 3:
        return x.reshape(b, n, h, d // group_size, group_size)
    short = -n % group_size
    if short:  # repeating the last token leaves every minimum and maximum as it was
        x = torch.cat([x, x[:, -1:].expand(b, short, h, d)], dim=1)
    return x.reshape(b, -1, group_size, h, d)


def quantise(
    x: Tensor,
    bits: int,
    *,
    group_size: int,
    axis: int = 3,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> PackedTensor:
    """Round to nearest with one scale (and one offset) per group.

    Args:
        x: ``[b, n, h, d]``.
        bits: 4 or 8.
        group_size: elements that share a scale; divides ``d`` for axis 3.
        axis: 3 = channels of one token, 1 = tokens of one channel.
        symmetric: no offset; codes are centred on ``2 ** (bits - 1)``.
        scale_dtype: storage of scales and offsets.

    Raises:
        ValueError: settings that `PackedTensor` refuses.
    """
    if axis == 3 and x.shape[3] % group_size:
        raise ValueError(f"quantise: group_size={group_size} does not divide head_dim={x.shape[3]}")
    if _fused(x.device, x.shape[3], group_size, bits, axis):
        from .triton_pack import pack

        return pack(x, bits, group_size, symmetric, scale_dtype)
    levels = 2**bits - 1
    groups = _grouped(x.float(), group_size, axis)
    inner = 4 if axis == 3 else 2
    if symmetric:
        half = 2 ** (bits - 1)
        scale = (groups.abs().amax(inner, keepdim=True) / (half - 1)).to(scale_dtype)
        zero, start = None, -half * scale.float()
    else:
        low, high = groups.amin(inner, keepdim=True), groups.amax(inner, keepdim=True)
        zero = low.to(scale_dtype)
        start = zero.float()
        scale = ((high - start).clamp_min(0) / levels).to(scale_dtype)
    step = scale.float()
    codes = ((groups - start) / torch.where(step == 0, 1.0, step)).round().clamp(0, levels).to(torch.uint8)
    codes = codes.reshape(x.shape) if axis == 3 else codes.flatten(1, 2)[:, : x.shape[1]]
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return PackedTensor(
        codes=codes.contiguous(),
        scale=scale.squeeze(inner),
        zero=None if zero is None else zero.squeeze(inner),
        bits=bits,
        group_size=group_size,
        axis=axis,
        shape=tuple(x.shape),  # type: ignore[arg-type]
        dtype=x.dtype,
    )


def dequantise(packed: PackedTensor, out: Tensor | None = None) -> Tensor:
    """The values a `PackedTensor` stands for, ``[b, n, h, d]`` in its dtype.

    Args:
        packed: what to unpack.
        out: a scratch of that shape with contiguous channels; written and returned. One scratch shared by all
            layers keeps the peak at one unpacked layer.
    """
    if _fused(packed.device, packed.shape[3], packed.group_size, packed.bits, packed.axis):
        from .triton_pack import unpack

        return unpack(
            packed,
            torch.empty(packed.shape, dtype=packed.dtype, device=packed.device) if out is None else out,
        )
    codes = packed.codes
    if packed.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if packed.zero is None:
        offset = -(2 ** (packed.bits - 1)) * packed.scale.float()
    else:
        offset = packed.zero.float()
    n = packed.shape[1]
    size = packed.group_size
    if packed.axis == 3:
        values = codes.unflatten(-1, (-1, size)).float()
        values = (values * packed.scale.float()[..., None] + offset[..., None]).flatten(-2)
    else:
        scale = packed.scale.float().repeat_interleave(size, 1, output_size=packed.scale.shape[1] * size)
        offset = offset.repeat_interleave(size, 1, output_size=offset.shape[1] * size)
        values = codes.float() * scale[:, :n] + offset[:, :n]
    if out is None:
        return values.to(packed.dtype)
    out.copy_(values)
    return out

"""The dense parts of one Wan block, around its self-attention: pure functions of the block's modules and tensors.

`enter` and `leave` are all of a block but the attention to the past; as functions of a module they can be compiled
once for all layers (`compiled`), which fuses norms, modulation, gates and residuals into few kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.kernels.cross import AnnCA, cross_attention

Row = tuple[Tensor, ...]
"""Modulation of a layer: (shift1, 1 + scale1, gate1, shift2, 1 + scale2, gate2), see `modulation.Modulation`."""
Text = tuple[Tensor, Tensor, "Tensor | None"]
"""Keys, values and bias of a prompt in a layer."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis: statistics in float32, cast back to the dtype of ``x``, then the weight."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight.float(), eps)
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, x.shape[-1:], None, eps).to(x.dtype) * weight.to(x.dtype)


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    """The layer norm of a block in the dtype of ``x`` (the framework accumulates in float32)."""
    if not isinstance(norm, torch.nn.LayerNorm):
        return norm(x)  # models without a cross-attention norm have an identity here
    weight, bias = (None if p is None else p.to(x.dtype) for p in (norm.weight, norm.bias))
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * scale + shift`` with tables of one row a frame (scale is 1 + the model's scale)."""
    return torch.addcmul(shift, x.unflatten(1, (shift.shape[1], -1)), scale).flatten(1, 2)


def gated(h: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """``h + out * gate`` with a table of one row a frame."""
    rows = gate.shape[1]
    return torch.addcmul(h.unflatten(1, (rows, -1)), out.unflatten(1, (rows, -1)), gate).flatten(1, 2)


def split(x: Tensor, heads: int) -> Tensor:
    """``[b, n, dim]`` to ``[b, n, heads, head_dim]``."""
    return x.unflatten(-1, (heads, -1))


def qkv(attn: Any, a: Tensor, heads: int, need_q: bool = True) -> tuple[Tensor | None, Tensor, Tensor]:
    """Queries (unless not needed), keys and values ``[b, n, heads, head_dim]``, normalised, not rotated."""
    if getattr(attn, "fused_projections", False):
        q, k, v = attn.to_qkv(a).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(a) if need_q else None, attn.to_k(a), attn.to_v(a)
    if q is not None:
        q = split(rms_norm(q, attn.norm_q.weight, attn.norm_q.eps), heads)
    return q, split(rms_norm(k, attn.norm_k.weight, attn.norm_k.eps), heads), split(v, heads)


def project(attn: Any, out: Tensor) -> Tensor:
    """The output projection of attention ``[b, n, heads, head_dim]``."""
    return attn.to_out[0](out.flatten(2))


def cross(
    attn: Any, x: Tensor, heads: int, text: Text, image: tuple[Tensor, Tensor] | None, rule: AnnCA | None
) -> Tensor:
    """Cross-attention of normalised tokens ``x [b, n, dim]`` to a prompt and, in some models, an image."""
    q = split(rms_norm(attn.to_q(x), attn.norm_q.weight, attn.norm_q.eps), heads)
    out = cross_attention(q, *text, rule)
    if image is not None:
        out = out + cross_attention(q, *image)
    return project(attn, out)


def feed_forward(block: Any, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Third norm, modulation and FFN, without gate and residual."""
    return block.ffn(modulated(layer_norm(h, block.norm3), shift, scale))


def enter(
    block: Any, h: Tensor, shift: Tensor, scale: Tensor, heads: int, need_q: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """From the tokens ``h [b, n, dim]`` to what self-attention takes (see `qkv`)."""
    return qkv(block.attn1, modulated(layer_norm(h, block.norm1), shift, scale), heads, need_q)


def leave(
    block: Any,
    h: Tensor,
    attended: Tensor,
    row: Row,
    heads: int,
    text: Text,
    image: tuple[Tensor, Tensor] | None = None,
    rule: AnnCA | None = None,
) -> Tensor:
    """From what self-attention gives ``[b, n, heads, head_dim]`` to the block's output ``[b, n, dim]``."""
    _, _, gate1, shift2, scale2, gate2 = row
    h = gated(h, project(block.attn1, attended), gate1)
    h = h + cross(block.attn2, layer_norm(h, block.norm2), heads, text, image, rule)
    return gated(h, feed_forward(block, h, shift2, scale2), gate2)


def compiled(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`enter` and `leave` through ``torch.compile``: same numbers within rounding, compiled at the first chunk.

    Shapes are fixed (``dynamic=False``), so a stream compiles once for its size and once more for a shorter first
    chunk or the context pass where their tables have other shapes; all layers share the code.

    Raises:
        StreamvidError: no C++ compiler on a CPU, or no Triton on a GPU.
    """
    from torch.utils._triton import has_triton_package

    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "cl"))):
        raise StreamvidError(
            "compile needs a C++ compiler (g++ or clang++) on a CPU; install one or leave it out"
        )
    if device.type == "cuda" and not has_triton_package():
        raise StreamvidError("compile needs Triton on a GPU; pip install triton, or leave it out")
    return torch.compile(enter, dynamic=False), torch.compile(leave, dynamic=False)

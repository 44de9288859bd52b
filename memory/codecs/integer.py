"""Rounding to nearest, groups of channels of one token: ``int8``, ``int4``, ``int2``.

The baseline of every study of KV quantisation (RTN). int8 is visually lossless in published video runs; int4 loses
mostly on keys, whose outliers sit in fixed channels, which ``center`` removes; symmetric int2 has three codes only
and is here for comparison. Bytes of bf16 at head_dim 128: int8 0.516, int4 0.266, int2 0.156 (asymmetric).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from streamvid.kernels.types import PackedTensor
from streamvid.memory.codecs.base import Codec, PackedKV, Shape, Side
from streamvid.memory.codecs.rounding import dequantise, group_bound, group_size, quantise


@dataclass(kw_only=True)
class Int8(Codec):
    """8 bits a number, one fp16 scale for each group of channels of a token."""

    group: int = 64
    """Channels that share a scale; the whole head when it has fewer."""
    asym: bool = False
    """Cover each group's own range (an fp16 offset a group) instead of a range symmetric around zero."""
    center: bool = False
    """Subtract each channel's mean over the block's tokens from the keys first, and add it back when decoding."""

    bits: ClassVar[int] = 8
    shared: ClassVar[frozenset[str]] = frozenset({"mean"})

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        return self.asym

    def _group(self, head_dim: int) -> int:
        return group_size(self.group, head_dim, f"int{self.bits}")

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        extra: dict[str, Tensor] = {}
        if self.center and side == "k":
            # Keys are un-rotated here, and rotation differs from token to token: the mean must come back.
            extra["mean"] = x.float().mean(1, keepdim=True)
            x = x - extra["mean"]
        return quantise(x, self.bits, self._group(x.shape[3]), asymmetric=self.asym) | extra

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        centered = "mean" in parts
        # Added in fp32: a sum in half precision would round twice.
        target = torch.empty(out.shape, dtype=torch.float32, device=out.device) if centered else out
        dequantise(parts, self.bits, self._group(out.shape[3]), target)
        if centered:
            out.copy_(target.add_(parts["mean"]))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        return group_bound(parts, shape[1], self._group(shape[3]), self.bits)

    def kernel_view(self, packed: PackedKV) -> tuple[PackedTensor, PackedTensor] | None:
        if self.center or self.bits not in (4, 8):
            return None
        k, v = (self._kernel_side(packed, packed.side(side)) for side in ("k", "v"))
        return k, v

    def _kernel_side(self, packed: PackedKV, parts: dict[str, Tensor]) -> PackedTensor:
        settings: dict[str, Any] = {"bits": self.bits, "group_size": self._group(packed.shape[3]), "axis": 3}
        return PackedTensor(
            codes=parts["codes"],
            scale=parts["scale"],
            zero=parts.get("zero"),
            shape=packed.shape,
            dtype=packed.dtype,
            **settings,
        )


@dataclass(kw_only=True)
class Int4(Int8):
    """4 bits a number, two to a byte."""

    bits: ClassVar[int] = 4


@dataclass(kw_only=True)
class Int2(Int8):
    """2 bits a number, four to a byte. Symmetric codes are -1, 0 and 1 only, so the offset is on by default."""

    asym: bool = True
    """As in int8; without it one of the four codes is never used."""

    bits: ClassVar[int] = 2

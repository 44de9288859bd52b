"""KIVI: keys grouped along tokens (a scale for each channel), values along channels (a scale for each token).

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024). Outliers of keys sit in fixed
channels, so a scale that one channel shares over some tokens does not suffer from them.

Deviations: a group is ``group`` consecutive tokens of one block in raster order, the last one shorter, so no frame
waits for a full group and there is no residual of its own (what is recent is a matter of ``mixed``). The offset is
the float minimum of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from streamvid.kernels.types import PackedTensor
from streamvid.memory.codecs.base import Codec, PackedKV, Shape, Side
from streamvid.memory.codecs.rounding import dequantise, group_bound, group_size, quantise


@dataclass(kw_only=True)
class Kivi(Codec):
    """Asymmetric codes; keys per channel, values per token."""

    bits: Literal[2, 4, 8] = 2
    """Bits a number."""
    group: int = 32
    """Tokens (keys) or channels (values) that share a scale and an offset."""

    token_wise: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = True

    def _layout(self, side: Side, head_dim: int) -> tuple[int, int]:
        return (self.group, 1) if side == "k" else (group_size(self.group, head_dim, "kivi"), 3)

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        group, axis = self._layout(side, x.shape[3])
        return quantise(x, self.bits, group, asymmetric=True, axis=axis)

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        group, axis = self._layout(side, out.shape[3])
        dequantise(parts, self.bits, group, out, axis=axis)

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        group, axis = self._layout(side, shape[3])
        return group_bound(parts, shape[1], group, self.bits, axis=axis)

    def kernel_view(self, packed: PackedKV) -> tuple[PackedTensor, PackedTensor] | None:
        if self.bits == 2:
            return None
        views = []
        for side in ("k", "v"):
            parts, (group, axis) = packed.side(side), self._layout(side, packed.shape[3])
            views.append(
                PackedTensor(
                    codes=parts["codes"],
                    scale=parts["scale"],
                    zero=parts["zero"],
                    bits=self.bits,
                    group_size=group,
                    axis=axis,
                    shape=packed.shape,
                    dtype=packed.dtype,
                )
            )
        return views[0], views[1]

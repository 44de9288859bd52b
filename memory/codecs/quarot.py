"""QuaRot: a Hadamard rotation of the channels of each head spreads outliers before rounding.

Source: "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (NeurIPS 2024). Keys are stored un-rotated by RoPE, so
the Hadamard rotation is undone when decoding; folding it into the query, as the paper does, needs keys after RoPE.

Deviation: a head_dim that is no power of two is rotated in blocks of its largest power-of-two divisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from streamvid.memory.codecs.base import Codec, Shape, Side
from streamvid.memory.codecs.rounding import (
    dequantise,
    group_bound,
    group_size,
    power_of_two,
    quantise,
    rotate_channels,
)


@dataclass(kw_only=True)
class QuaRot(Codec):
    """Hadamard, then round to nearest in groups of channels."""

    bits: Literal[2, 4, 8] = 4
    """Bits a number."""
    group: int = 64
    """Rotated channels that share a scale."""
    asym: bool = False
    """An fp16 offset a group."""

    @property
    def exact_constants(self) -> bool:  # type: ignore[override]
        # The rotation back spreads what fp16 rounded off the offset over all channels.
        return not self.asym

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        group = group_size(self.group, x.shape[3], "quarot")
        rotated = rotate_channels(x.float(), power_of_two(x.shape[3]))
        return quantise(rotated, self.bits, group, asymmetric=self.asym)

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        rotated = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dequantise(parts, self.bits, group_size(self.group, out.shape[3], "quarot"), rotated)
        out.copy_(rotate_channels(rotated, power_of_two(out.shape[3])))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        # The rotation is orthonormal: the Euclidean error is the same before and after it.
        return group_bound(parts, shape[1], group_size(self.group, shape[3], "quarot"), self.bits)

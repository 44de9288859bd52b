"""PRQ, progressive residual quantisation: codes of the numbers, then 4-bit codes of what was left over.

Source: the method of that name in a public study of 33 KV quantisers for Self-Forcing, where it was the most
faithful and saved no more than int8 does. The same groups serve both stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from streamvid.memory.codecs.base import Codec, Shape, Side
from streamvid.memory.codecs.rounding import dequantise, group_bound, group_size, quantise

RESIDUAL_BITS = 4


def _stage(parts: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name[:-1]: part for name, part in parts.items() if name.endswith(str(number))}


@dataclass(kw_only=True)
class Prq(Codec):
    """``Q_bits(x) + Q_4(x - Q_bits(x))``, symmetric."""

    bits: Literal[2, 4] = 4
    """Bits of the first stage; the second has 4."""
    group: int = 64
    """Channels that share a scale, in both stages."""

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        group = group_size(self.group, x.shape[3], "prq")
        x = x.float()
        first = quantise(x, self.bits, group, asymmetric=False)
        coarse = torch.empty_like(x)
        dequantise(first, self.bits, group, coarse)
        second = quantise(x - coarse, RESIDUAL_BITS, group, asymmetric=False)
        return {f"{k}1": v for k, v in first.items()} | {f"{k}2": v for k, v in second.items()}

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        group = group_size(self.group, out.shape[3], "prq")
        total, fine = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
        dequantise(_stage(parts, 1), self.bits, group, total)
        dequantise(_stage(parts, 2), RESIDUAL_BITS, group, fine)
        out.copy_(total.add_(fine))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        group = group_size(self.group, shape[3], "prq")
        return group_bound(_stage(parts, 2), shape[1], group, RESIDUAL_BITS)

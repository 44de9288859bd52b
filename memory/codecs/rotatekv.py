"""RotateKV: deal outlier channels out over the groups, rotate each group, keep a few extreme tokens as they are.

Source: "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via Outlier-Aware Adaptive Rotations".
Keys (before RoPE) have their channels sorted by magnitude and dealt to the groups, a Hadamard rotation in each
group, and asymmetric codes for each token and group with a clipped range; values are rotated and rounded alike
without the sorting. Tokens of extreme norm stay exact.

Deviations: the order of channels is taken from the block itself and stored (a byte a channel), so no calibration
file is needed; a fixed number of tokens with the largest norm is kept, not those above a threshold, so that shapes
do not depend on data; heads are not grouped (Wan has no grouped-query attention); the range is ``2^bits - 1`` steps
(the published simulation has ``bits^2 - 1``, which differs for 3 bits only).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
class RotateKV(Codec):
    """Sorted and rotated channels, asymmetric codes, a few exact tokens."""

    bits: Literal[2, 4] = 2
    """Bits a number."""
    group: int = 64
    """Channels rotated together, and sharing a scale and an offset."""
    clip: float = 0.95
    """Share of each group's range that the codes cover."""
    exact_tokens: int = 2
    """Tokens of each block and head, those with the largest key or value norm, that are stored as they are."""

    token_wise: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset({"order", "exact", "exact_at"})
    exact_constants: ClassVar[bool] = (
        False  # the clipped range leaves out the one channel a constant rotates into
    )

    def __post_init__(self) -> None:
        if not 0.5 <= self.clip <= 1:
            raise ValueError(f"codec rotatekv: clip={self.clip} (allowed: 0.5 to 1)")
        if self.exact_tokens < 0:
            raise ValueError(f"codec rotatekv: exact_tokens={self.exact_tokens} (allowed: 0 and more)")

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        d = x.shape[3]
        group = group_size(self.group, d, "rotatekv")
        parts: dict[str, Tensor] = {}
        keep = min(self.exact_tokens, x.shape[1])
        if keep:
            # A stable sort, not topk: equal norms must choose the same tokens on every device.
            norms = x.float().square().sum(-1)
            at = norms.sort(dim=1, descending=True, stable=True).indices[:, :keep].contiguous()
            parts["exact"] = x.gather(1, at[..., None].expand(-1, -1, -1, d))
            parts["exact_at"] = at.to(torch.int32)
        if side == "k":
            ranks = x.float().abs().sum(1, keepdim=True).sort(dim=3, descending=True, stable=True).indices
            order = ranks.unflatten(3, (group, d // group)).transpose(3, 4).flatten(3)
            parts["order"] = order.to(torch.uint8 if d <= 256 else torch.int16).contiguous()
            x = x.gather(3, order.expand(x.shape))
        rotated = rotate_channels(x.float().unflatten(3, (-1, group)), power_of_two(group)).flatten(3)
        return parts | quantise(rotated, self.bits, group, asymmetric=True, clip=self.clip)

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        group = group_size(self.group, out.shape[3], "rotatekv")
        rotated = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dequantise(parts, self.bits, group, rotated)
        plain = rotate_channels(rotated.unflatten(3, (-1, group)), power_of_two(group)).flatten(3)
        if "order" in parts:
            back = parts["order"].long().argsort(dim=3)
            plain = plain.gather(3, back.expand(plain.shape))
        out.copy_(plain)
        if "exact" in parts:
            at = parts["exact_at"].long()[..., None].expand(parts["exact"].shape)
            out.scatter_(1, at, parts["exact"].to(out.dtype))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        group = group_size(self.group, shape[3], "rotatekv")
        half = group_bound(parts, shape[1], group, self.bits)
        # A clipped end lies outside by (1 - clip) / 2 of the range, which is 2^bits - 1 steps over clip.
        outside = (2**self.bits - 1) * (1 - self.clip) / (2 * self.clip)
        return half + (parts["scale"].float().square() * group).sum(-1).sqrt() * outside

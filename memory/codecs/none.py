"""No quantisation: the tensors as they are. What every other codec is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from streamvid.memory.codecs.base import Codec, PackedKV, Shape, Side


@dataclass(kw_only=True)
class NoCodec(Codec):
    """Keys and values in the dtype they come in; decoding without scratch gives the stored tensors, no copy."""

    check: Literal["auto", "always", "never"] = "never"
    """As in `Codec`, but off: nothing is rounded here, and the plain path must cost nothing."""

    lossless: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = True

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        # A copy, because a view would keep the whole buffer it was cut from alive.
        return {"x": x.clone(memory_format=torch.contiguous_format)}

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        out.copy_(parts["x"])

    def decode(self, packed: PackedKV, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return super().decode(packed, out) if out else (packed.parts["k.x"], packed.parts["v.x"])

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        return torch.zeros(shape[:3], device=parts["x"].device)

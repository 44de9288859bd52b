"""NVFP4 storage: E2M1 numbers in groups of 16 channels with an E4M3 scale, and one fp32 factor a head.

Source: the KV cache of LongLive 2.0 and NVIDIA's NVFP4 format. This is the storage format, decoded in software; FP4
arithmetic needs Blackwell-class hardware and is not used. The scale of a group is the better, by squared error, of
the two that put the group's largest number on 6 or on 4.

Deviation: no smoothing that subtracts a channel's mean from the keys, as it changes attention unless it is added
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.memory.codecs.base import Codec, Shape, Side
from streamvid.memory.codecs.rounding import constant, pack_bits, to_e4m3, unpack_bits

GROUP = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
TARGETS = (6.0, 4.0)


def _rounded(magnitude: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..7 of ``magnitude / scale`` and the numbers they stand for."""
    safe = scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(magnitude / safe, constant(MIDDLES, torch.float32, scale.device), out_int32=True)
    return codes, constant(VALUES, torch.float32, scale.device)[codes] * scale


@dataclass(kw_only=True)
class Nvfp4(Codec):
    """4.5 bits a number: sign and E2M1 magnitude, block scales E4M3."""

    shared: ClassVar[frozenset[str]] = frozenset({"gain"})

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        if x.shape[3] % GROUP:
            raise ValueError(f"codec nvfp4: groups of {GROUP} channels do not divide head_dim={x.shape[3]}")
        x = x.float().unflatten(3, (-1, GROUP))
        magnitude = x.abs()
        # Puts the largest block scale of each head at the top of E4M3, whatever the head's magnitude.
        gain = magnitude.amax((1, 3, 4), keepdim=True) / (448.0 * TARGETS[-1])
        gain = gain.clamp_(min=torch.finfo(torch.float32).tiny)
        absmax = magnitude.amax(4, keepdim=True)
        scale, codes, error = None, None, None
        for target in TARGETS:
            candidate = to_e4m3(absmax / (target * gain))
            picked, value = _rounded(magnitude, candidate.float() * gain)
            loss = (value - magnitude).square().sum(4, keepdim=True)
            if error is None:
                scale, codes, error = candidate, picked, loss
                continue
            better = loss < error
            scale = torch.where(better, candidate.view(torch.uint8), scale.view(torch.uint8)).view(
                scale.dtype
            )
            codes, error = torch.where(better, picked, codes), torch.where(better, loss, error)
        codes = codes.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)
        return {
            "codes": pack_bits(codes.flatten(3), 4),
            "scale": scale.squeeze(4).contiguous(),
            "gain": gain[..., 0].contiguous(),
        }

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        table = constant(VALUES + tuple(-value for value in VALUES), torch.float32, out.device)
        values = table[unpack_bits(parts["codes"], 4).int()].unflatten(3, (-1, GROUP))
        torch.mul(values, self._scale(parts), out=out.unflatten(3, (-1, GROUP)))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        # Half the widest gap (4 to 6) is one scale; what saturates, by rounding of the scale, is less.
        return (self._scale(parts)[..., 0].square() * GROUP).sum(3).sqrt()

    def _scale(self, parts: dict[str, Tensor]) -> Tensor:
        return (parts["scale"].float() * parts["gain"])[..., None]

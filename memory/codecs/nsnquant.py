"""NSNQuant: normalise, shift, normalise, rotate; then one universal codebook serves every model.

Source: "NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV Cache". Each
token is scaled to unit variance, each channel's mean over the block is taken away, each token is scaled again and
rotated by a Hadamard matrix; what remains is close to independent standard normal numbers, whatever the model, so
groups of channels are replaced by the nearest of 256 vectors fitted once to normal noise.

Deviations: the paper's codebook is not published as data; this one is built by k-means on seeded normal noise, in
double precision, and rounded to multiples of 1/256, on first use. The second scale is the least-squares one for the
vectors chosen, not the plain norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from streamvid.memory.codecs.base import Codec, Shape, Side
from streamvid.memory.codecs.kmeans import tiles
from streamvid.memory.codecs.rounding import power_of_two, rotate_channels

ENTRIES = 256


@lru_cache(maxsize=8)
def build_codebook(width: int, samples: int = 1 << 14, iterations: int = 25) -> Tensor:
    """256 vectors ``[256, width]`` (fp32, CPU) that fit standard normal noise, by k-means; under a second."""
    noise = torch.randn(samples, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    table = noise[:ENTRIES].clone()
    for _ in range(iterations):
        near = (noise @ table.T - table.square().sum(1) / 2).argmax(1)
        sums = torch.zeros_like(table).index_add_(0, near, noise)
        sizes = torch.bincount(near, minlength=ENTRIES)[:, None]
        table = torch.where(sizes > 0, sums / sizes.clamp(min=1), table)
    return (table * 256).round().div(256).float()


@lru_cache(maxsize=8)
def _codebook(width: int, device: torch.device) -> Tensor:
    return build_codebook(width).to(device)


def _norm(x: Tensor) -> Tensor:
    """Root mean square over channels, fp16 and never zero."""
    return x.square().mean(-1, keepdim=True).sqrt().clamp_(min=2.0**-14, max=65504.0).to(torch.float16)


@dataclass(kw_only=True)
class NsnQuant(Codec):
    """A byte for every 4 (2 bits a number) or 8 (1 bit) channels, two fp16 scales a token and head."""

    bits: Literal[1, 2] = 2
    """Bits a number: vectors of 8 or of 4 channels."""

    shared: ClassVar[frozenset[str]] = frozenset({"mean"})

    @property
    def width(self) -> int:
        """Channels of one codebook vector."""
        return 8 // self.bits

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        b, n, h, d = x.shape
        if d % self.width:
            raise ValueError(f"codec nsnquant: vectors of {self.width} channels do not divide head_dim={d}")
        x = x.float()
        outer = _norm(x)
        x = x / outer.float()
        mean = x.mean(1, keepdim=True).to(torch.float16)
        x = x - mean.float()
        inner = _norm(x)
        x = rotate_channels(x / inner.float(), power_of_two(d)).unflatten(3, (-1, self.width))
        table = _codebook(self.width, x.device)
        half = table.square().sum(1) / 2
        codes = torch.empty(b, n, h, d // self.width, dtype=torch.uint8, device=x.device)
        for tile in tiles(n, b * h * d // self.width, ENTRIES, x.device):
            codes[:, tile] = (x[:, tile] @ table.T - half).argmax(-1).to(torch.uint8)
        chosen = table[codes.int()]
        # The multiple of the chosen vectors that is nearest to the token.
        share = (x * chosen).sum((3, 4)) / chosen.square().sum((3, 4)).clamp(min=2.0**-14)
        inner = (inner.float() * share[..., None]).clamp_(-65504.0, 65504.0).to(torch.float16)
        return {"codes": codes, "outer": outer, "inner": inner, "mean": mean}

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        values = _codebook(self.width, out.device)[parts["codes"].int()].flatten(3)
        values = rotate_channels(values, power_of_two(out.shape[3])).mul_(parts["inner"].float())
        out.copy_(values.add_(parts["mean"].float()).mul_(parts["outer"].float()))

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        # A projection is never longer than what it projects: after the shift a token of unit variance has at most
        # the norm sqrt(d) + |mean|, and its error is at most that.
        mean = parts["mean"].float().square().sum(-1).sqrt()
        return parts["outer"].float()[..., 0] * (shape[3] ** 0.5 + mean) * 1.01

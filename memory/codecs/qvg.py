"""QVG: k-means takes away what tokens have in common, and two bits are enough for the rest.

Source: "Quant VideoGen" (QVG). For each head, and keys and values apart, the tokens of a span (24 latent frames) are
clustered; a token keeps the number of its centroid and a 2-bit residual in blocks of 64 channels with an E4M3
scale. More stages cluster the residual again. Bytes of bf16 at 37,440 tokens a span: 0.144.

``rule="parity"`` is the published scale, ``absmax`` of the block: with the three codes -1, 0, 1 most of a bell-shaped
residual then rounds to zero. ``rule="search"`` takes, for each block, the share of ``absmax`` with the least squared
error; the bytes are the same.

Deviations: a span of fewer tokens gets fewer centroids, or they would outweigh what they save; first centroids are
evenly spaced tokens unless ``init=random``, so that the result depends on nothing but the data; one fp32 factor a
head keeps small values inside E4M3's range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.memory.codecs.base import Codec, Shape, Side
from streamvid.memory.codecs.kmeans import assign, kmeans, tiles
from streamvid.memory.codecs.rounding import group_size, pack_bits, to_e4m3, unpack_bits

MOST_CENTROIDS = 256
TOKENS_PER_CENTROID = 128
"""Gives the published 256 at the published span (37,440 tokens), and keeps centroids under 1/128 of bf16's bytes."""
SHARES = (1.0, 0.9, 0.8, 0.7, 0.62, 0.54, 0.46, 0.4, 0.35)


@dataclass(kw_only=True)
class Qvg(Codec):
    """Centroid numbers and low-bit residuals over a span of frames."""

    bits: Literal[2, 4] = 2
    """Bits of the residual; with 2 the codes are -1, 0 and 1."""
    group: int = 64
    """Channels of the residual that share a scale."""
    stages: int = 1
    """Rounds of clustering; each costs a byte a token and head, and its centroids."""
    centroids: int | None = None
    """Centroids of each head and stage, at most 256; none = one for `TOKENS_PER_CENTROID` tokens of the span."""
    iterations: int = 2
    """Lloyd iterations."""
    rule: Literal["search", "parity"] = "search"
    """How a block's scale is chosen: least squared error, or ``absmax`` as published."""
    init: Literal["strided", "random"] = "strided"
    """The first centroids: evenly spaced tokens, or a seeded random choice as published."""
    seed: int = 0
    """Of ``init=random``."""
    span_frames: int = 24  # type: ignore[misc]
    """Latent frames packed together; fewer make the centroids weigh more."""

    shared: ClassVar[frozenset[str]] = frozenset({"gain"} | {f"centroids{i}" for i in range(8)})
    shift_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        limits = (("centroids", 1, MOST_CENTROIDS), ("stages", 1, 8), ("iterations", 0, 1000))
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"codec qvg: {name}={value} (allowed: {low} to {high})")
        if self.span_frames < 1:
            raise ValueError(f"codec qvg: span_frames={self.span_frames} (allowed: 1 and more)")

    @property
    def top(self) -> int:
        """The largest residual code."""
        return 2 ** (self.bits - 1) - 1

    def pack(self, x: Tensor, side: Side) -> dict[str, Tensor]:
        b, n, h, d = x.shape
        group = group_size(self.group, d, "qvg")
        count = min(self.centroids or max(1, n // TOKENS_PER_CENTROID), MOST_CENTROIDS, n)
        by_head = x.transpose(1, 2).flatten(0, 1)
        tables: list[Tensor] = []
        residual = by_head
        for stage in range(self.stages):
            table = kmeans(residual, count, self.iterations, init=self.init, seed=self.seed + stage)
            tables.append(table.bfloat16())
            if stage + 1 < self.stages:
                residual = torch.cat(
                    [self._reduce(residual[:, t], tables[-1:])[0] for t in tiles(n, b * h, count, x.device)],
                    dim=1,
                )
        # A residual is at most twice the largest number, so this puts every scale inside E4M3.
        gain = by_head.abs().amax((1, 2)).float() * (2 / (448 * self.top))
        gain = gain.clamp_(min=torch.finfo(torch.float32).tiny)[:, None, None]
        ids = torch.empty(self.stages, b * h, n, dtype=torch.uint8, device=x.device)
        codes = torch.empty(b * h, n, d * self.bits // 8, dtype=torch.uint8, device=x.device)
        scale = torch.empty(b * h, n, d // group, dtype=torch.float8_e4m3fn, device=x.device)
        for tile in tiles(n, b * h, count, x.device):
            rest, numbers = self._reduce(by_head[:, tile], tables)
            for stage, number in enumerate(numbers):
                ids[stage, :, tile] = number
            codes[:, tile], scale[:, tile] = self._round(rest.unflatten(-1, (-1, group)), gain)
        back = lambda part: part.unflatten(0, (b, h)).transpose(1, 2).contiguous()
        parts = {"codes": back(codes), "scale": back(scale), "gain": gain.view(b, 1, h, 1)}
        for stage in range(self.stages):
            parts[f"ids{stage}"] = back(ids[stage])
            parts[f"centroids{stage}"] = back(tables[stage])
        return parts

    def _reduce(self, x: Tensor, tables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What is left of ``x [s, t, d]`` after its centroid of each stage, fp32, and the centroid numbers."""
        x, numbers = x.float(), []
        for table in tables:
            table = table.float()
            ids = assign(x, table)
            x = x - table.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
            numbers.append(ids.to(torch.uint8))
        return x, numbers

    def _round(self, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes and E4M3 scales of the residual ``x [s, t, groups, group]``."""
        absmax = x.abs().amax(-1) / gain
        best, best_codes, best_error = None, None, None
        for share in SHARES if self.rule == "search" else SHARES[:1]:
            scale = to_e4m3(absmax * (share / self.top))
            step = (scale.float() * gain)[..., None]
            codes = (x / step.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-self.top, self.top)
            error = (codes * step).sub_(x).square_().sum(-1)
            bits = scale.view(torch.uint8)
            if best is None:
                best, best_codes, best_error = bits, codes, error
                continue
            better = error < best_error
            best, best_error = torch.where(better, bits, best), torch.where(better, error, best_error)
            best_codes = torch.where(better[..., None], codes, best_codes)
        whole = best_codes.add_(2 ** (self.bits - 1)).to(torch.uint8).flatten(-2)
        return pack_bits(whole, self.bits), best.view(torch.float8_e4m3fn)

    def unpack(self, parts: dict[str, Tensor], side: Side, out: Tensor) -> None:
        group = group_size(self.group, out.shape[3], "qvg")
        values = unpack_bits(parts["codes"], self.bits).view(torch.int8).sub_(2 ** (self.bits - 1))
        total = values.unflatten(3, (-1, group)) * self._step(parts)[..., None]
        total = total.flatten(3)
        for stage in range(self.stages):
            total += _look_up(parts[f"centroids{stage}"], parts[f"ids{stage}"])
        out.copy_(total)

    def _step(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["scale"].float() * parts["gain"]

    def bound(self, parts: dict[str, Tensor], side: Side, shape: Shape) -> Tensor:
        # Half a step inside the range. Outside of it the published rule only errs by the rounding of an E4M3 scale
        # (2^-4 of the range), the search by what its smallest share leaves out as well.
        share = SHARES[-1] if self.rule == "search" else 1.0
        worst = max(0.5, self.top * ((1 + 2**-4) / share - 1))
        step = self._step(parts)
        slack = parts["gain"] * 2**-9
        return ((step * worst + slack).square() * group_size(self.group, shape[3], "qvg")).sum(3).sqrt()


def _look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``table [b, c, h, d]`` at ``ids [b, n, h]``: ``[b, n, h, d]``."""
    b, c, h, d = table.shape
    first = torch.arange(b * h, dtype=torch.int32, device=ids.device).view(b, 1, h) * c
    return F.embedding(ids.int() + first, table.transpose(1, 2).reshape(b * h * c, d))

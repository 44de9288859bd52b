"""SeaCache: compares consecutive inputs after a filter that keeps what is signal at the current noise level.

The filter is Wiener's for a spectrum falling as ``1 / f^p``, one gain an axis; the distance is the relative
L1 change of the filtered latent. ``order`` 1 extrapolates the trunk residual linearly from the last two
full steps. With fresh noise at each step the indicator saturates (measured on synthetic latents), so
few-step sampling is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.accumulate import AccumulatingSession
from streamvid.stepcache.base import Footprint, StepCache
from streamvid.stepcache.extrapolate import extrapolation
from streamvid.stepcache.hooks import relative_change
from streamvid.stepcache.types import StepInfo


def spectral_filter(x: Tensor, sigma: float, power: float = 3.0) -> Tensor:
    """``x`` ``[b, f, c, h, w]`` through the gains of noise level ``sigma``; fp32, same shape."""
    s = min(max(sigma, 1e-6), 1 - 1e-6)
    gain = torch.ones(1, device=x.device)
    for axis in (1, 3, 4):
        frequency = torch.fft.fftfreq(x.shape[axis], device=x.device).abs()
        spectrum = 1.0 / (frequency**power + 1e-16)
        one = (1 - s) * spectrum / ((1 - s) ** 2 * spectrum + s**2 + 1e-16)
        shape = [1] * 5
        shape[axis] = -1
        gain = gain * one.view(shape)
    gain = gain / gain.mean()
    return torch.fft.ifftn(gain * torch.fft.fftn(x.float(), dim=(1, 3, 4)), dim=(1, 3, 4)).real


class _Session(AccumulatingSession):
    def start(self) -> None:
        self.depth = self.settings.order + 1

    def reset(self) -> None:
        super().reset()
        self.newest: dict[str, Tensor] = {}
        self.change: dict[str, Tensor] = {}

    def watch(self, info: StepInfo, x_t: Tensor) -> None:
        now = spectral_filter(x_t, info.sigma, self.settings.power)
        before = self.newest.get(info.branch)
        if before is not None and before.shape == now.shape:
            self.change[info.branch] = relative_change(now, before)
        self.newest[info.branch] = now

    def distance(self, info: StepInfo, x_t: Tensor) -> float:
        return float(self.change.get(info.branch, float("inf")))

    def coefficients(self, info: StepInfo) -> tuple[float, ...]:
        return extrapolation([entry.sigma for entry in self.history(info.branch)], info.sigma)

    def footprint(self) -> Footprint:
        # One filtered latent and one scalar a branch; fp32 whatever the latents are.
        return Footprint(latents=3, hiddens=self.settings.order + 1)


@dataclass(kw_only=True)
class SeaCache(StepCache):
    """Skip while the summed change of the spectrally filtered latent stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "every indicator that looks at the input sees the fresh noise, not the content"
    name: ClassVar[str] = "seacache"
    neutral: ClassVar[str] = "seacache:threshold=0"
    lively: ClassVar[str] = "seacache:threshold=100"
    knob: ClassVar[tuple[str, ...]] = tuple(
        f"seacache:threshold={v},max_skips=1000,order=0" for v in (0, 0.05, 100)
    )
    session_type = _Session

    threshold: float = 0.25
    """Summed distance at which a step is run; 0 never skips."""
    warmup: int = 1
    """First steps of a chunk that are always run."""
    tail: int = 1
    """Last steps that are always run."""
    max_skips: int = 2
    """Most skips in a row."""
    order: int = 1
    """0 reuses the trunk residual, 1 extrapolates it from the last two full steps."""
    power: float = 3.0
    """Exponent of the assumed spectrum."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.warmup < 1 or self.tail < 0 or self.order not in (0, 1):
            raise StreamvidError(
                "step cache 'seacache': threshold and tail must be at least 0, warmup at least 1, order 0 or 1"
            )

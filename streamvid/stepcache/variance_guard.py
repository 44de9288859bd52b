"""Variance guard (the variance compensation of Q&C): keeps the statistics of predicted x0 where full steps
had them.

Caching and quantisation both shrink or widen the prediction a little at each step, and chunks inherit it.
The guard learns mean and standard deviation a channel and step from full steps, and rescales the x0 of
skipped or partial steps (of all steps with ``always``) when it strays by more than ``tolerance``. It skips
nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.types import Decision, StepInfo, StepOutput

_DIMS = (1, 3, 4)


class _Session(Session):
    static = True

    def start(self) -> None:
        self.reference: dict[str, tuple[Tensor, Tensor]] = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        return full("guard")

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        key = f"{info.branch}.{info.step}"
        mean = out.x0.float().mean(_DIMS, keepdim=True)
        std = out.x0.float().std(_DIMS, keepdim=True)
        is_full = decision.mode in ("full", "merge_clean")
        known = self.reference.get(key)
        if known is not None and known[0].shape != mean.shape:
            known = None
        if is_full and (known is None or not self.settings.always):
            keep = self.settings.memory
            self.reference[key] = (
                (mean, std)
                if known is None
                else (known[0].lerp(mean, 1 - keep), known[1].lerp(std, 1 - keep))
            )
        if known is None or (is_full and not self.settings.always):
            return None
        ratio = known[1] / std.clamp_min(1e-12)
        # A whole-tensor choice on the device: no sync, and untouched values stay bit-equal.
        stray = (ratio - 1).abs() > self.settings.tolerance
        scaled = known[0] + (out.x0.float() - mean) * ratio
        return torch.where(stray, scaled.to(out.x0.dtype), out.x0)

    def on_context_change(self, kind: str) -> None:
        super().on_context_change(kind)
        self.reference = {}

    def footprint(self) -> Footprint:
        # Two values a channel, clip and step: below one latent for any real grid.
        return Footprint(latents=1)


@dataclass(kw_only=True)
class VarianceGuard(StepCache):
    """Rescale x0 of reused steps to the mean and spread that full steps have. Combine it: ``mask... +
    guard``."""

    name: ClassVar[str] = "guard"
    neutral: ClassVar[str] = "guard"
    session_type = _Session

    tolerance: float = 0.02
    """Relative error of the standard deviation that is left alone."""
    memory: float = 0.9
    """Share of the old reference when a new full step is seen."""
    always: bool = False
    """Also correct full steps, against the first chunk's statistics: a guard for quantised caches."""

    def __post_init__(self) -> None:
        if self.tolerance < 0 or not 0 <= self.memory <= 1:
            raise StreamvidError("step cache 'guard': tolerance must be at least 0 and memory in 0..1")

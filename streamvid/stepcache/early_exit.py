"""Early exit: stop refining a chunk when its clean prediction has stopped changing.

With fresh noise at each step every indicator that looks at the model's input is blind (at sigma 0.6 and
above two inputs of the same content differ by more than their own size); the change of x0 between steps is
not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Session, StepCache, full
from streamvid.stepcache.types import Decision, StepInfo


def change(new: Tensor, old: Tensor, top: float) -> Tensor:
    """Relative change of x0: mean |new - old| over the ``top`` most changed places, by mean |old|."""
    moved = (new.float() - old.float()).abs().mean(2).flatten()
    if top < 1:
        moved = moved.topk(max(1, int(top * moved.numel()))).values
    return moved.mean() / old.float().abs().mean().clamp_min(1e-12)


class _Session(Session):
    keeps = ("x0",)
    depth = 2

    def reset(self) -> None:
        self.left = False

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        entries = self.history(info.branch)
        if not self.left and len(entries) == 2 and info.step >= self.settings.min_steps:
            moved = float(change(entries[0].values["x0"], entries[1].values["x0"], self.settings.top))
            if not math.isfinite(moved):
                self.warn("the change of x0 is not finite; the chunk is run in full")
            self.left = moved < self.settings.threshold
        if not self.left:
            return full("threshold")
        return Decision(mode="reuse", space="x0", reason="threshold")


@dataclass(kw_only=True)
class EarlyExit(StepCache):
    """Leave a chunk once x0 changes less than ``threshold`` between two steps; the rest is reused."""

    name: ClassVar[str] = "exit"
    neutral: ClassVar[str] = "exit:threshold=0"
    lively: ClassVar[str] = "exit:threshold=100"
    knob: ClassVar[tuple[str, ...]] = tuple(f"exit:threshold={v}" for v in (0, 0.05, 0.2, 0.5, 100))
    session_type = _Session

    threshold: float = 0.1
    """Relative change of x0 below which the chunk is done; 0 never leaves."""
    top: float = 1.0
    """Part of the latent's places, the most changed ones, over which the change is taken."""
    min_steps: int = 2
    """Steps that are always run."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or not 0 < self.top <= 1 or self.min_steps < 2:
            raise StreamvidError(
                "step cache 'exit': threshold must be at least 0, top in (0, 1], min_steps at least 2"
            )

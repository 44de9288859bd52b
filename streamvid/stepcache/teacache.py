"""TeaCache (CVPR 2025): the change of the time embedding between steps predicts the change of the output.

In the Wan port the indicator is the projected time embedding alone, so the distances are known before
sampling starts and nothing is measured at run time. The published polynomials hold for relative changes up
to about 0.09; beyond, they are negative and would skip everything, so values are clamped at 0 and larger
changes count as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.accumulate import AccumulatingSession
from streamvid.stepcache.base import StepCache
from streamvid.stepcache.calibration import load_for
from streamvid.stepcache.types import SamplingPlan, StepInfo

POLYNOMIALS: dict[str, tuple[float, ...]] = {
    "wan1.3b": (-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2),
    "wan14b": (-3.03318725e5, 4.90537029e4, -2.65530556e3, 5.87365115e1, -3.15583525e-1),
}
"""Published fits, highest degree first, for the projected time embedding."""
VALID_UP_TO = 0.09


def sinusoidal_change(timesteps: tuple[float, ...], size: int = 256) -> list[float]:
    """Relative L1 change of the raw sinusoidal embedding from step to step; 0 for the first."""
    t = torch.tensor(timesteps, dtype=torch.float64)
    angles = t[:, None] * 10000.0 ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    table = torch.cat([angles.cos(), angles.sin()], 1)
    change = (table[1:] - table[:-1]).abs().mean(1) / table[:-1].abs().mean(1)
    return [0.0, *change.tolist()]


def distances(plan: SamplingPlan, polynomial: str, fitted: tuple[float, ...] | None) -> list[float]:
    """Distance added by each step; needs the plan's ``time_change`` or falls back to the raw embedding."""
    change = list(plan.time_change) if plan.time_change else sinusoidal_change(plan.timesteps)
    coefficients = fitted or POLYNOMIALS.get(polynomial)
    if coefficients is None:
        return change
    out = []
    for value in change:
        y = 0.0
        for c in coefficients:
            y = y * value + c
        # Outside the fitted range a degree-4 polynomial says nothing; the raw change is at least monotone.
        out.append(max(0.0, y) if fitted or value <= VALID_UP_TO else value)
    return out


class _Session(AccumulatingSession):
    static = True

    def start(self) -> None:
        fitted = None
        if self.settings.file is not None:
            values = load_for(self, self.settings.file, ["tea_polynomial"])
            fitted = None if values is None else tuple(values["tea_polynomial"])
        self.table = distances(self.plan, self.settings.polynomial, fitted)

    def distance(self, info: StepInfo, x_t: Tensor) -> float:
        return self.table[info.step]


@dataclass(kw_only=True)
class TeaCache(StepCache):
    """Skip steps while the summed (mapped) change of the time embedding stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "teacache"
    neutral: ClassVar[str] = "teacache:threshold=0"
    lively: ClassVar[str] = "teacache:threshold=100"
    knob: ClassVar[tuple[str, ...]] = tuple(
        f"teacache:threshold={v},max_skips=1000" for v in (0, 0.1, 0.3, 1, 3, 100)
    )
    session_type = _Session

    threshold: float = 0.3
    """Summed distance at which a step is run; 0 never skips."""
    warmup: int = 2
    """First steps of a chunk that are always run."""
    tail: int = 1
    """Last steps that are always run."""
    max_skips: int = 4
    """Most skips in a row."""
    polynomial: Literal["none", "wan1.3b", "wan14b"] = "none"
    """Published map from embedding change to output change; ``none`` uses the change itself."""
    file: str | None = None
    """Calibration file holding a polynomial fitted to this model."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.warmup < 1 or self.tail < 0:
            raise StreamvidError(
                "step cache 'teacache': threshold must be at least 0, warmup at least 1, tail at least 0"
            )
        if self.file is not None and self.polynomial != "none":
            raise StreamvidError("step cache 'teacache': give polynomial or file, not both")

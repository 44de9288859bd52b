"""The common skeleton of threshold caches: add up a distance a step, skip while the sum stays below a
threshold.

Compared with published code: distances are clamped at 0 and the test is strict, so threshold 0 never skips; a
distance that is not finite runs the step in full and starts again.
"""

from __future__ import annotations

import math

from torch import Tensor

from streamvid.stepcache.base import Session, full
from streamvid.stepcache.types import Decision, Space, StepInfo


class AccumulatingSession(Session):
    """A session with one accumulator a branch. Settings need ``threshold``, ``warmup``, ``tail``,
    ``max_skips``.

    ``warmup`` first and ``tail`` last steps of a chunk are full; at most ``max_skips`` skips in a row.
    """

    per_branch = True
    keeps = ("residual",)
    space: Space = "residual"

    def reset(self) -> None:
        self.sums: dict[str, float] = {}
        self.skips: dict[str, int] = {}

    def distance(self, info: StepInfo, x_t: Tensor) -> float:
        """How far this step's answer is expected to be from the last one's."""
        raise NotImplementedError

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        settings, branch = self.settings, info.branch
        distance = self.distance(info, x_t)
        if info.step < settings.warmup or info.step >= info.num_steps - settings.tail:
            self._restart(branch)
            return full("warmup" if info.step < settings.warmup else "tail")
        if not math.isfinite(distance):
            self._restart(branch)
            self.warn("a step cache distance was not finite; the step was run in full")
            return full("shape")
        total = self.sums.get(branch, 0.0) + max(0.0, distance)
        count = self.skips.get(branch, 0)
        if total < settings.threshold and count < settings.max_skips:
            self.sums[branch], self.skips[branch] = total, count + 1
            return Decision(
                mode="reuse", space=self.space, reason="threshold", coefficients=self.coefficients(info)
            )
        self._restart(branch)
        return full("threshold" if total >= settings.threshold else "cap")

    def _restart(self, branch: str) -> None:
        self.sums[branch], self.skips[branch] = 0.0, 0

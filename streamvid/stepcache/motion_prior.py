"""Fewer steps for chunks that follow a still one: the motion of finished chunks as a prior (FlowCache's
idea).

FlowCache lets every chunk decide for itself. A sequential few-step model has one chunk in flight and sees
nothing useful before its first x0, but motion changes slowly from chunk to chunk, so the last chunk's
motion is known in time. Still chunks skip the steps in ``skip``; moving ones run all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Session, StepCache, full
from streamvid.stepcache.motion import mean_motion
from streamvid.stepcache.types import ChunkInfo, Decision, StepInfo


class _Session(Session):
    # The one value is read at the end of a chunk, when the chunk is handed over anyway.
    static = True
    ties_clips = True
    keeps = ("x0",)

    def start(self) -> None:
        s, last = self.settings, self.plan.num_steps - 1
        self.skip = s.skip or tuple(range(1, last))
        if any(not 0 < step <= last for step in self.skip):
            raise StreamvidError(f"step cache 'motion': skip={list(s.skip)} must lie in 1..{last}")
        self.motion: float | None = None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if self.motion is None or self.motion >= self.settings.threshold:
            return full("threshold")
        if info.step not in self.skip:
            return full("mask")
        return Decision(mode="reuse", space="x0", reason="threshold")

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        if x0.shape[1] > 1:
            self.motion = float(mean_motion(x0))

    def on_context_change(self, kind: str) -> None:
        super().on_context_change(kind)
        self.motion = None


@dataclass(kw_only=True)
class MotionPrior(StepCache):
    """Skip steps in chunks whose predecessor moved less than ``threshold``."""

    name: ClassVar[str] = "motion"
    neutral: ClassVar[str] = "motion:threshold=0"
    lively: ClassVar[str] = "motion:threshold=1.1"
    knob: ClassVar[tuple[str, ...]] = tuple(f"motion:threshold={v}" for v in (0, 0.3, 0.5, 0.7, 1.1))
    session_type = _Session

    threshold: float = 0.1
    """Relative frame difference of the last chunk, 0 (still) to 1; 0 never skips."""
    skip: tuple[int, ...] = ()
    """Steps to skip in still chunks; empty: all but the first and the last."""

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise StreamvidError(f"step cache 'motion': threshold must be at least 0, got {self.threshold}")

"""AdaCache with motion regularisation (MoReg): how fast one anchor block changes decides how long to reuse.

At each computed step the change of the anchor's residual since the last computed one, a step, is looked up
in a codebook of thresholds that gives the next interval. MoReg multiplies the change by the motion of the
residual between latent frames and by how fast that motion changes, so that moving content is refreshed more
often. While reusing, the whole trunk residual is kept: the released code keeps every module's, which for a
pure reuse adds up to the same trunk at many times the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import NullHooks
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo


class _Anchor(NullHooks):
    """Hands the anchor block's residual to the session."""

    def __init__(self, session: _Session, info: StepInfo):
        self.session, self.info = session, info

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        if layer == self.session.anchor:
            self.session.anchor_seen(self.info, h_out - h_in)
        return None


def motion_of(residual: Tensor, frames: int) -> Tensor:
    """Relative difference between latent frames of ``[b, n, dim]``; a device scalar in 0..1."""
    by_frame = residual.float().unflatten(1, (frames, -1))
    new, old = by_frame[:, 1:], by_frame[:, :-1]
    return (new - old).abs().sum() / (new.abs().sum() + old.abs().sum()).clamp_min(1e-12)


class _Session(Session):
    needs_block_hooks = True
    per_branch = True
    keeps = ("residual",)

    def start(self) -> None:
        self.anchor = self.plan.num_layers // 2

    def reset(self) -> None:
        self.residual: dict[str, Tensor] = {}
        self.seen_at: dict[str, int] = {}
        self.until: dict[str, int] = {}
        self.motion: dict[str, float] = {}

    def anchor_seen(self, info: StepInfo, residual: Tensor) -> None:
        """Set the next interval from the change since the last computed step."""
        branch, s = info.branch, self.settings
        known, at = self.residual.get(branch), self.seen_at.get(branch, info.step - 1)
        self.residual[branch], self.seen_at[branch] = residual, info.step
        self.until[branch] = info.step + 1
        if known is None or known.shape != residual.shape or residual.shape[0] > 1:
            return
        gap = max(1, info.step - at)
        change = float((residual.float() - known.float()).abs().sum() / known.float().abs().sum()) / gap
        frames = info.chunk.num_latents
        if s.motion and frames > 1:
            motion = (float(motion_of(residual, frames)) / s.motion_scale) ** 8
            growth = 10 * (motion - self.motion.get(branch, motion)) / gap
            self.motion[branch] = motion
            change *= max(motion + abs(growth), 1e-6)
        if math.isfinite(change):
            self.until[branch] = info.step + self._interval(change)

    def _interval(self, change: float) -> int:
        for limit, steps in zip(self.settings.limits, self.settings.intervals, strict=True):
            if change < limit:
                return steps
        return 1

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s = self.settings
        if info.step < s.warmup or info.step >= info.num_steps - s.tail:
            return full("warmup" if info.step < s.warmup else "tail")
        if info.step >= self.until.get(info.branch, 0):
            return full("threshold")
        return Decision(mode="reuse", space="residual", reason="threshold")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        return _Anchor(self, info)

    def footprint(self) -> Footprint:
        return Footprint(hiddens=2)


@dataclass(kw_only=True)
class AdaCache(StepCache):
    """Reuse the trunk for as many steps as the anchor block's rate of change allows."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "adacache"
    neutral: ClassVar[str] = "adacache:limits=0,intervals=2"
    lively: ClassVar[str] = "adacache:limits=100,intervals=3,motion=false"
    session_type = _Session

    limits: tuple[float, ...] = (0.08, 0.16, 0.24, 0.32, 0.40)
    """Rising thresholds of the change a step; at and above the last every step is run."""
    intervals: tuple[int, ...] = (6, 5, 4, 3, 2)
    """Steps until the next computed one, one a threshold."""
    motion: bool = True
    """Motion regularisation."""
    motion_scale: float = 0.385
    """Residual frame difference that counts as ordinary motion."""
    warmup: int = 2
    """First steps of a chunk that are always run."""
    tail: int = 1
    """Last steps that are always run."""

    def __post_init__(self) -> None:
        if len(self.limits) != len(self.intervals) or list(self.limits) != sorted(self.limits):
            raise StreamvidError("step cache 'adacache': limits must rise and have one interval each")
        if any(n < 1 for n in self.intervals) or self.motion_scale <= 0:
            raise StreamvidError("step cache 'adacache': intervals must be at least 1, motion_scale positive")

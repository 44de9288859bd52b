"""MagCache (NeurIPS 2025): the trunk residual's size follows a fixed curve over the steps; skip where it is
flat.

Nothing is measured at run time: the curve comes from a calibration file, or from the session's own first
chunk, which is full anyway. As released, the residual is reused unscaled; ``rescale`` multiplies it by the
curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.calibration import load_for
from streamvid.stepcache.types import ChunkInfo, Decision, StepInfo, StepOutput


def resample(curve: Sequence[float], num_steps: int) -> list[float]:
    """Nearest-neighbour resampling of a curve to another number of steps."""
    if num_steps == 1:
        return [curve[0]]
    last = len(curve) - 1
    return [curve[round(i * last / (num_steps - 1))] for i in range(num_steps)]


def magnitude_ratio(new: Tensor, old: Tensor) -> Tensor:
    """``mean over tokens of ||new|| / ||old||`` for residuals ``[b, n, dim]``; a device scalar."""
    return (new.float().norm(dim=-1) / old.float().norm(dim=-1).clamp_min(1e-12)).mean()


class _Session(Session):
    static = True
    per_branch = True
    keeps = ("residual",)

    def start(self) -> None:
        self.ties_clips = self.settings.file is None
        self.curve: dict[str, list[float]] = {}
        self.measured: dict[str, list[Tensor]] = {}
        if self.settings.file is not None:
            values = load_for(self, self.settings.file, ["gamma"])
            for branch, curve in (values or {"gamma": {}})["gamma"].items():
                self.curve[branch] = resample(curve, self.plan.num_steps)

    def reset(self) -> None:
        self.ratio: dict[str, float] = {}
        self.error: dict[str, float] = {}
        self.skips: dict[str, int] = {}
        self.measured = {}

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        entries = self.history(info.branch)
        learns = self.settings.file is None and self.chunks_done == 0
        if learns and entries and out.residual is not None and "residual" in entries[0].values:
            ratio = magnitude_ratio(out.residual, entries[0].values["residual"])
            self.measured.setdefault(info.branch, []).append(ratio)
        return None

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        for branch, values in self.measured.items():
            if len(values) == self.plan.num_steps - 1:
                self.curve[branch] = [1.0, *(float(v) for v in values)]

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s, branch = self.settings, info.branch
        if info.step < max(1, int(s.retention * info.num_steps)):
            return full("warmup")
        if branch not in self.curve:
            return full("calibration")
        ratio = self.ratio.get(branch, 1.0) * self.curve[branch][info.step]
        error = self.error.get(branch, 0.0) + abs(1.0 - ratio)
        skips = self.skips.get(branch, 0) + 1
        if error < s.threshold and skips <= s.max_skips:
            self.ratio[branch], self.error[branch], self.skips[branch] = ratio, error, skips
            scale = ratio if s.rescale else 1.0
            return Decision(mode="reuse", space="residual", reason="threshold", coefficients=(scale,))
        self.ratio[branch], self.error[branch], self.skips[branch] = 1.0, 0.0, 0
        return full("threshold" if error >= s.threshold else "cap")

    def footprint(self) -> Footprint:
        return Footprint(hiddens=1, latents=1)


@dataclass(kw_only=True)
class MagCache(StepCache):
    """Skip while the summed deviation of the residual's magnitude ratio from 1 stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "magcache"
    neutral: ClassVar[str] = "magcache:threshold=0"
    lively: ClassVar[str] = "magcache:threshold=100"
    knob: ClassVar[tuple[str, ...]] = tuple(
        f"magcache:threshold={v},max_skips=1000" for v in (0, 0.02, 0.1, 0.5, 100)
    )
    session_type = _Session

    threshold: float = 0.12
    """Summed error at which a step is run; 0 never skips."""
    max_skips: int = 2
    """Most skips in a row."""
    retention: float = 0.2
    """First share of a chunk's steps that are always run."""
    rescale: bool = False
    """Scale the reused residual by the curve."""
    file: str | None = None
    """Calibration file; None learns the curve on the first chunk."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.max_skips < 0 or not 0 <= self.retention <= 1:
            raise StreamvidError(
                "step cache 'magcache': threshold and max_skips must be at least 0, retention in 0..1"
            )

"""Prediction of skipped steps from the last few full ones: Adams-Bashforth (AB-Cache) and TaoCache.

AB-Cache: consecutive outputs are nearly linear in the step, so a polynomial through the last ``order`` full
steps predicts the next; ours is the Lagrange polynomial on the sigma grid, exact for outputs polynomial in
sigma.
TaoCache: the change of the output keeps its direction, so ``out_i = out_{i-1} + kappa (out_{i-1} -
out_{i-2})`` with one fitted factor a step; its rule is not published in detail, and the least-squares
factor is used here. With fresh noise both work on x0, otherwise on the noise prediction (TaoCache) or the
velocity (AB-Cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.calibration import load_for
from streamvid.stepcache.types import ChunkInfo, Decision, StepInfo, StepOutput


def extrapolation(known: Sequence[float], target: float) -> tuple[float, ...]:
    """Lagrange weights at ``target`` of the values at ``known`` (sigmas, newest first)."""
    weights = []
    for j, at in enumerate(known):
        weight = 1.0
        for m, other in enumerate(known):
            if m != j:
                weight *= (target - other) / (at - other)
        weights.append(weight)
    return tuple(weights)


def skip_steps(skip: tuple[int, ...], every: int, start: float, num_steps: int) -> tuple[int, ...]:
    """Explicit steps, or all but each ``every``-th from ``start`` (fraction of the run) on; the last is
    run."""
    if skip:
        if any(not 0 < step < num_steps for step in skip):
            raise StreamvidError(f"skip={list(skip)} must lie in 1..{num_steps - 1}")
        return skip
    first = max(1, round(start * num_steps))
    return tuple(step for step in range(first, num_steps - 1) if (step - first) % every != every - 1)


class _AdamsSession(Session):
    static = True

    def start(self) -> None:
        s: AdamsBashforth = self.settings
        self.skip = skip_steps(s.skip, s.every, s.start, self.plan.num_steps)
        self.keeps = ("x0",) if self.plan.noise_kind == "fresh" else ("velocity",)
        self.depth = s.order

    def coefficients(self, info: StepInfo) -> tuple[float, ...]:
        return extrapolation([entry.sigma for entry in self.history(info.branch)], info.sigma)

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if info.step not in self.skip:
            return full("mask")
        return Decision(
            mode="reuse", space=self.keeps[0], reason="mask", coefficients=self.coefficients(info)
        )


@dataclass(kw_only=True)
class AdamsBashforth(StepCache):
    """Skip fixed steps and predict them by a polynomial through the last ``order`` full ones."""

    name: ClassVar[str] = "adams"
    neutral: ClassVar[str] = "adams:every=1"
    lively: ClassVar[str] = "adams:every=3,start=0"
    session_type = _AdamsSession

    order: int = 2
    """Full steps used, 1 to 3; 1 repeats the last."""
    skip: tuple[int, ...] = ()
    """Steps to skip; overrides every and start."""
    every: int = 2
    """From ``start`` on, one step in ``every`` is run; 1 skips nothing."""
    start: float = 0.25
    """Fraction of a chunk's steps before the first skip."""

    def __post_init__(self) -> None:
        if not 1 <= self.order <= 3:
            raise StreamvidError(f"step cache 'adams': order must be 1, 2 or 3, got {self.order}")
        if self.every < 1 or not 0 <= self.start <= 1:
            raise StreamvidError("step cache 'adams': every must be at least 1 and start in 0..1")


class _TaoSession(Session):
    """Factors come from a file, from ``kappa``, or from the session's first chunk, which is always full."""

    static = True
    depth = 2

    def start(self) -> None:
        s: TaoCache = self.settings
        self.skip = skip_steps(s.skip, s.every, s.start, self.plan.num_steps)
        self.keeps = ("x0",) if self.plan.noise_kind == "fresh" else ("eps",)
        self.ties_clips = s.file is None and s.kappa is None
        self.factors: dict[int, float] = {}
        self.measured: dict[int, Tensor] = {}
        if s.file is not None:
            name = "kappa_x0" if self.plan.noise_kind == "fresh" else "kappa_eps"
            values = load_for(self, s.file, [name])
            self.factors = {} if values is None else {int(k): v for k, v in values[name].items()}

    def reset(self) -> None:
        self.measured = {}

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        entries = self.history(info.branch)
        learns = self.settings.file is None and self.settings.kappa is None and self.chunks_done == 0
        if learns and info.branch == "cond" and len(entries) == 2:
            space = self.keeps[0]
            new = out.x0 if space == "x0" else out.x0 + out.flow
            self.measured[info.step] = fitted_factor(new, entries[0].values[space], entries[1].values[space])
        return None

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        for step, value in self.measured.items():
            self.factors[step] = max(-1.0, min(2.0, float(value)))

    def coefficients(self, info: StepInfo) -> tuple[float, ...]:
        entries = self.history(info.branch)
        if len(entries) < 2:
            return (1.0,)
        kappa = self.settings.kappa if self.settings.kappa is not None else self.factors.get(info.step, 0.0)
        # A factor is fitted on adjacent steps; over a gap it scales with the distance in sigma.
        newest, older = entries[0], entries[1]
        adjacent = newest.step - older.step == 1 and info.step - newest.step == 1
        if not adjacent:
            kappa *= (newest.sigma - info.sigma) / max(1e-6, older.sigma - newest.sigma)
        return (1.0 + kappa, -kappa)

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if info.step not in self.skip:
            return full("mask")
        if self.keeps[0] == "eps" and info.sigma > 0.99:
            return full("guard")
        return Decision(
            mode="reuse", space=self.keeps[0], reason="mask", coefficients=self.coefficients(info)
        )

    def footprint(self) -> Footprint:
        return Footprint(latents=2)


def fitted_factor(new: Tensor, last: Tensor, older: Tensor) -> Tensor:
    """Least squares ``kappa`` of ``new - last`` on ``last - older``: ``cos * ratio of norms``; a device
    scalar."""
    now, before = (new.float() - last.float()).flatten(), (last.float() - older.float()).flatten()
    return torch.dot(now, before) / torch.dot(before, before).clamp_min(1e-12)


@dataclass(kw_only=True)
class TaoCache(StepCache):
    """Skip late steps and extrapolate with one fitted factor a step."""

    name: ClassVar[str] = "taocache"
    neutral: ClassVar[str] = "taocache:every=1"
    lively: ClassVar[str] = "taocache:every=3,start=0"
    session_type = _TaoSession

    skip: tuple[int, ...] = ()
    """Steps to skip; overrides every and start."""
    every: int = 2
    """From ``start`` on, one step in ``every`` is run; 1 skips nothing."""
    start: float = 0.5
    """Fraction of a chunk's steps before the first skip: early steps decide structure."""
    kappa: float | None = None
    """One factor for all steps; None fits one a step on the first chunk."""
    file: str | None = None
    """Calibration file holding fitted factors."""

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.start <= 1:
            raise StreamvidError("step cache 'taocache': every must be at least 1 and start in 0..1")
        if self.kappa is not None and self.file is not None:
            raise StreamvidError("step cache 'taocache': give kappa or file, not both")

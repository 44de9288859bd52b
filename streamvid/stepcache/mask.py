"""Static masks: a fixed list of steps to skip (LeMiCa and hand-written).

LeMiCa (NeurIPS 2025) chooses the mask offline so that the largest error that any skipped stretch causes in
the final output is smallest, then the second largest, and so on; :mod:`streamvid.stepcache.search` is that
search. A mask has no run-time cost. With fresh noise and order 0, skipping a step *is* deleting it from the
step list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Session, StepCache, full
from streamvid.stepcache.calibration import load_for
from streamvid.stepcache.extrapolate import extrapolation
from streamvid.stepcache.types import Decision, SamplingPlan, Space, StepInfo


class _Session(Session):
    static = True

    def start(self) -> None:
        settings: StaticMask = self.settings
        self.skip: tuple[int, ...] = settings.skip
        if settings.file is not None:
            values = load_for(self, settings.file, ["masks"])
            self.skip = () if values is None else self._from_file(values["masks"])
        elif settings.full_steps is not None:
            self.skip = even_mask(self.plan.num_steps, settings.full_steps)
        if any(not 0 < step < self.plan.num_steps for step in self.skip):
            raise StreamvidError(
                f"step cache 'mask': skip={list(self.skip)} must lie in 1..{self.plan.num_steps - 1} "
                "(the first step of a chunk is always run)"
            )
        self.space: Space = settings.space if settings.space != "auto" else _space(self.plan)
        # keeps and depth depend on the settings here; instance attributes shadow the class's.
        self.keeps = (self.space,)
        self.depth = settings.order + 1

    def _from_file(self, masks: dict[str, list[int]]) -> tuple[int, ...]:
        budget = str(self.settings.full_steps)
        if budget not in masks:
            raise StreamvidError(
                f"step cache 'mask': the calibration has no mask with full_steps={budget} "
                f"(allowed: {', '.join(sorted(masks, key=int))})"
            )
        return tuple(masks[budget])

    def coefficients(self, info: StepInfo) -> tuple[float, ...]:
        entries = self.history(info.branch)[: self.depth]
        return extrapolation([entry.sigma for entry in entries], info.sigma)

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if info.step not in self.skip:
            return full("mask")
        return Decision(mode="reuse", space=self.space, reason="mask", coefficients=self.coefficients(info))


def _space(plan: SamplingPlan) -> Space:
    return "x0" if plan.noise_kind == "fresh" else "residual"


def even_mask(num_steps: int, full_steps: int) -> tuple[int, ...]:
    """Steps to skip so that ``full_steps`` evenly spread ones remain, the first and the last among them."""
    if not 1 <= full_steps <= num_steps:
        raise StreamvidError(f"full_steps must be in 1..{num_steps}, got {full_steps}")
    if full_steps == 1:
        return tuple(range(1, num_steps))
    kept = {round(i * (num_steps - 1) / (full_steps - 1)) for i in range(full_steps)}
    return tuple(step for step in range(num_steps) if step not in kept)


@dataclass(kw_only=True)
class StaticMask(StepCache):
    """Skip fixed steps. Give ``skip``, or ``full_steps`` (evenly spread, or the searched mask of
    ``file``)."""

    name: ClassVar[str] = "mask"
    neutral: ClassVar[str] = "mask"
    lively: ClassVar[str] = "mask:full_steps=2"
    knob: ClassVar[tuple[str, ...]] = ("mask:full_steps=4", "mask:full_steps=3", "mask:full_steps=2")
    session_type = _Session

    skip: tuple[int, ...] = ()
    """Steps to skip, counted from 0."""
    full_steps: int | None = None
    """How many steps a chunk are run."""
    file: str | None = None
    """Calibration file holding searched masks."""
    order: int = 0
    """0 repeats the last full step, 1 extrapolates the last two on the sigma grid."""
    space: Literal["auto", "x0", "velocity", "residual"] = "auto"
    """What is reused; ``auto``: x0 with fresh noise, the trunk residual otherwise."""

    def __post_init__(self) -> None:
        if self.skip and (self.full_steps is not None or self.file is not None):
            raise StreamvidError(
                "step cache 'mask': give skip, or full_steps (with or without file), not both"
            )
        if self.file is not None and self.full_steps is None:
            raise StreamvidError("step cache 'mask': a file needs full_steps, the mask to take from it")
        if self.order not in (0, 1):
            raise StreamvidError(f"step cache 'mask': order must be 0 or 1, got {self.order}")

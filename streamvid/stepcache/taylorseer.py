"""TaylorSeer: predicts skipped steps by a Taylor series whose derivatives are finite differences of full
steps.

``lite`` predicts the model's output only (one latent); otherwise the outputs of every attention and
feed-forward module are predicted one by one, and only embedding, modulation and head are run. Differences
are taken between full steps and divided by their distance in steps, as released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import MODULES, ModuleStore
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo, StepOutput


def taylor_weights(full_steps: Sequence[int], step: int, order: int) -> tuple[float, ...]:
    """Weights of the values at ``full_steps`` (newest first) in the series of ``order`` at ``step``."""
    known = list(full_steps[: order + 1])
    ahead = step - known[0]
    # Rows: the j-th difference as weights of the known values; each divided by the newest distance.
    rows = [[1.0 if i == j else 0.0 for i in range(len(known))] for j in range(len(known))]
    weights, factor = [0.0] * len(known), 1.0
    for j in range(len(known)):
        weights = [w + factor * r for w, r in zip(weights, rows[0], strict=True)]
        factor *= ahead / (j + 1)
        rows = [
            [(a - b) / (known[i] - known[i + 1]) for a, b in zip(rows[i], rows[i + 1], strict=True)]
            for i in range(len(rows) - 1)
        ]
        if not rows:
            break
    return tuple(weights)


class _Session(Session):
    static = True

    def start(self) -> None:
        s = self.settings
        self.keeps = ("velocity",) if s.lite else ()
        self.depth = s.order + 1
        self.needs_block_hooks = not s.lite

    def reset(self) -> None:
        self.outputs: dict[str, dict[str, list[Tensor]]] = {}
        self.full_steps: dict[str, list[int]] = {}

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        if decision.mode in ("full", "merge_clean"):
            steps = self.full_steps.setdefault(info.branch, [])
            steps.insert(0, info.step)
            del steps[self.depth :]
        return None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s, steps = self.settings, self.full_steps.get(info.branch, [])
        if info.step < s.warmup or info.step >= info.num_steps - s.tail or not steps:
            return full("warmup" if info.step < s.warmup else "tail")
        if info.step - steps[0] >= s.interval:
            return full("mask")
        if s.lite:
            weights = taylor_weights(steps, info.step, s.order)
            return Decision(mode="reuse", space="velocity", reason="mask", coefficients=weights)
        return Decision(mode="blocks", reason="mask")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        store = self.outputs.setdefault(info.branch, {})
        if decision.mode != "blocks":
            return ModuleStore(store, MODULES, depth=self.depth)
        weights = taylor_weights(self.full_steps[info.branch], info.step, self.settings.order)
        return ModuleStore(store, (), MODULES, weights, self.depth)

    def footprint(self) -> Footprint:
        if self.settings.lite:
            return Footprint(latents=self.depth)
        return Footprint(hiddens=len(MODULES) * self.plan.num_layers * self.depth)


@dataclass(kw_only=True)
class TaylorSeer(StepCache):
    """Run every ``interval``-th step and predict the ones between by a Taylor series."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "taylorseer"
    neutral: ClassVar[str] = "taylorseer:interval=1"
    lively: ClassVar[str] = "taylorseer:interval=3,warmup=1"
    knob: ClassVar[tuple[str, ...]] = tuple(f"taylorseer:interval={v}" for v in (1, 2, 3, 5))
    session_type = _Session

    interval: int = 5
    """One full step in so many; 1 skips nothing."""
    order: int = 1
    """Highest derivative, 0 to 2."""
    warmup: int = 3
    """First steps of a chunk that are always run."""
    tail: int = 1
    """Last steps that are always run."""
    lite: bool = True
    """Predict the output only; false predicts every module (more memory, more exact)."""

    def __post_init__(self) -> None:
        if self.interval < 1 or not 0 <= self.order <= 2 or self.warmup < 1:
            raise StreamvidError(
                "step cache 'taylorseer': interval and warmup must be at least 1, order 0, 1 or 2"
            )

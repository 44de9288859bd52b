"""MixCache: each step chooses among skipping the step, the unconditional branch, or the middle blocks.

Caching may start once the residual has become stable for two steps. At every full step the error each
granularity would have made is measured (relative change of what it would have reused); afterwards the one
that saves most among those whose error, times its age, stays below the threshold is used. The published
trigger is not given in detail; this is the plain reading of its description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.block_deltas import BlockDeltas
from streamvid.stepcache.hooks import relative_change
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo, StepOutput


class _Session(Session):
    needs_block_hooks = True
    per_branch = True
    keeps = ("residual",)

    def start(self) -> None:
        layers = self.plan.num_layers
        self.middle = tuple(range(layers // 4, layers - max(1, layers // 4)))

    def reset(self) -> None:
        self.deltas: dict[str, dict[int, Tensor]] = {}
        self.errors: dict[str, float] = {}
        self.calm = 0
        self.age = 0
        self.choice = "full"
        self.residual: Tensor | None = None
        self.middle_sum: Tensor | None = None
        self.flows: dict[str, Tensor] = {}
        self.cfg_delta: Tensor | None = None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if info.branch == "cond":
            self.choice = self._choose(info)
            self.age = 0 if self.choice == "full" else self.age + 1
        if self.choice == "step" and self.history(info.branch):
            return Decision(mode="reuse", space="residual", reason="step")
        if self.choice == "cfg" and info.branch == "uncond" and self.cfg_delta is not None:
            return Decision(mode="reuse", space="velocity", reason="cfg")
        if self.choice == "blocks":
            return Decision(mode="blocks", reason="blocks")
        return full("threshold")

    def _choose(self, info: StepInfo) -> str:
        s = self.settings
        if info.step < s.warmup or info.step >= info.num_steps - s.tail or self.calm < 2:
            return "full"
        if self.age >= s.max_skips:
            return "full"
        saving = {"step": 1.0, "blocks": len(self.middle) / self.plan.num_layers}
        if "uncond" in self.plan.branches:
            saving["cfg"] = 0.5
        fits = [g for g in saving if self.errors.get(g, math.inf) * (self.age + 1) < s.threshold]
        return max(fits, key=lambda g: saving[g]) if fits else "full"

    def predict(self, info: StepInfo, x_t: Tensor, decision: Decision) -> Tensor:
        if decision.space == "velocity":
            assert self.cfg_delta is not None
            return self.flows["cond"] + self.cfg_delta
        return super().predict(info, x_t, decision)

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        self.flows[info.branch] = out.flow
        if decision.mode not in ("full", "merge_clean") or x_t.shape[0] > 1:
            return None
        if info.branch == "uncond":
            delta = out.flow - self.flows["cond"]
            if self.cfg_delta is not None:
                self.errors["cfg"] = float((delta - self.cfg_delta).abs().mean() / out.flow.abs().mean())
            self.cfg_delta = delta
            return None
        if out.residual is not None:
            if self.residual is not None and self.residual.shape == out.residual.shape:
                change = float(relative_change(out.residual, self.residual))
                self.errors["step"] = change
                self.calm = self.calm + 1 if change < self.settings.start else 0
            self.residual = out.residual
        total = sum(self.deltas[info.branch][layer] for layer in self.middle)
        if self.middle_sum is not None and out.residual is not None:
            # The block error is weighed by the whole residual: what the output would feel.
            error = (total - self.middle_sum).abs().mean() / out.residual.abs().mean()
            self.errors["blocks"] = float(error)
        self.middle_sum = total
        return None

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        store = self.deltas.setdefault(info.branch, {})
        return BlockDeltas(store, self.middle, self.middle if decision.mode == "blocks" else ())

    def footprint(self) -> Footprint:
        return Footprint(latents=3, hiddens=3 + len(self.middle))


@dataclass(kw_only=True)
class MixCache(StepCache):
    """Choose per step the cheapest of step, guidance and block reuse whose estimated error is acceptable."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "mixcache"
    neutral: ClassVar[str] = "mixcache:threshold=0"
    lively: ClassVar[str] = "mixcache:threshold=1000,start=1000,warmup=1"
    session_type = _Session

    threshold: float = 0.1
    """Estimated error, times age, that is accepted; 0 never reuses."""
    start: float = 0.2
    """Relative change of the residual below which, twice in a row, caching may start."""
    warmup: int = 3
    """First steps of a chunk that are always full."""
    tail: int = 1
    """Last steps that are always full."""
    max_skips: int = 3
    """Most steps between full ones."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.start <= 0 or self.warmup < 1 or self.max_skips < 1:
            raise StreamvidError(
                "step cache 'mixcache': threshold must be at least 0, start positive, warmup and max_skips "
                "at least 1"
            )

"""Counts what was run and what was skipped, per step and chunk. Flat in memory for endless streams."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from streamvid.stepcache.types import BlockHooks, Decision, ModuleShares, StepInfo

KEPT_CHUNKS = 32


class Accounting:
    """Forwards run and skipped, and their cost in units of one full forward."""

    def __init__(self) -> None:
        self.chunks: deque[dict[str, Any]] = deque(maxlen=KEPT_CHUNKS)
        self.steps: dict[int, dict[str, float]] = {}
        self.reasons: dict[str, int] = {}
        self.run = 0
        self.skipped = 0
        self.cost = 0.0

    def add(self, info: StepInfo, decision: Decision, cost: float) -> None:
        """Record one forward of one branch; ``cost`` 1 is a full one, 0 a skipped one."""
        skipped = decision.mode == "reuse"
        if not self.chunks or self.chunks[-1]["chunk"] != info.chunk.index:
            self.chunks.append({"chunk": info.chunk.index, "run": 0, "skipped": 0, "cost": 0.0, "modes": []})
        chunk = self.chunks[-1]
        step = self.steps.setdefault(info.step, {"run": 0, "skipped": 0, "cost": 0.0})
        for row in (chunk, step):
            row["run"] += not skipped
            row["skipped"] += skipped
            row["cost"] += cost
        chunk["modes"].append(decision.mode)
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        self.run += not skipped
        self.skipped += skipped
        self.cost += cost

    @property
    def compute_fraction(self) -> float:
        """Cost over that of running every forward in full; 1 before anything ran. Context passes not
        counted."""
        total = self.run + self.skipped
        return self.cost / total if total else 1.0

    def report(self) -> dict[str, Any]:
        """JSON-ready totals, per-step totals and the newest chunks."""

        def row(values: dict[str, Any]) -> dict[str, Any]:
            total = values["run"] + values["skipped"]
            return {**values, "compute_fraction": values["cost"] / total if total else 1.0}

        return {
            "forwards_run": self.run,
            "forwards_skipped": self.skipped,
            "compute_fraction": self.compute_fraction,
            "reasons": dict(sorted(self.reasons.items())),
            "steps": {str(step): row(values) for step, values in sorted(self.steps.items())},
            "chunks": [row(dict(values)) for values in self.chunks],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "skipped": self.skipped,
            "cost": self.cost,
            "reasons": dict(self.reasons),
            "steps": [[step, dict(row)] for step, row in self.steps.items()],
            "chunks": [dict(row) for row in self.chunks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run, self.skipped, self.cost = state["run"], state["skipped"], state["cost"]
        self.reasons = dict(state["reasons"])
        self.steps = {step: dict(row) for step, row in state["steps"]}
        self.chunks = deque((dict(row) for row in state["chunks"]), maxlen=KEPT_CHUNKS)


class CountingHooks:
    """Wraps a session's hooks (or none) and measures what they replaced, and the trunk residual if asked."""

    def __init__(
        self, inner: BlockHooks | None, num_layers: int, shares: ModuleShares, want_residual: bool = False
    ):
        self.inner, self.num_layers, self.shares = inner, num_layers, shares
        self.want_residual = want_residual
        self.saved = 0.0
        self.residual: Tensor | None = None
        self._first: Tensor | None = None

    @property
    def cost(self) -> float:
        """Part of the trunk that was computed."""
        return max(0.0, 1.0 - self.saved / self.num_layers)

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        if layer == 0 and self.want_residual:
            self._first = h.clone()
        value = self.inner.before_block(layer, h) if self.inner is not None else None
        if value is not None:
            self.saved += 1.0
            self._close(layer, value)
        return value

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        value = self.inner.after_block(layer, h_in, h_out) if self.inner is not None else None
        self._close(layer, h_out if value is None else value)
        return value

    def _close(self, layer: int, h: Tensor) -> None:
        if layer == self.num_layers - 1 and self._first is not None:
            self.residual, self._first = h - self._first, None

    def before_module(self, layer: int, name: str) -> Tensor | None:
        value = self.inner.before_module(layer, name) if self.inner is not None else None
        if value is not None:
            self.saved += getattr(self.shares, name)
        return value

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        return self.inner.after_module(layer, name, out) if self.inner is not None else None

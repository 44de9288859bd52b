"""First-block cache and DBCache: the first blocks are always run, and their change decides about the rest.

The probe is the residual of the first ``front`` blocks. If it differs little from that of the last full
step, the middle blocks are replaced by their kept residual; ``back`` last blocks are always run.
First-block cache is front 1, back 0. Strictly smaller than the threshold, so that 0 never skips. diffusers'
hook keeps its state on the model, one for all streams; ours keeps it in the session.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import NullHooks, relative_change
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo


class _Hooks(NullHooks):
    """Probes at the seam of front and middle; skips the middle by adding its kept residual."""

    def __init__(self, session: _Session, branch: str, may_skip: bool):
        self.session, self.branch, self.may_skip = session, branch, may_skip
        layers = session.plan.num_layers
        self.first = min(session.settings.front, layers - 1)
        self.last = max(self.first, layers - session.settings.back - 1)
        self.entry: Tensor | None = None
        self.seam: Tensor | None = None
        self.skipping = False

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        if layer == 0:
            self.entry = h.clone()
        if layer == self.first and self.entry is not None:
            probe = h - self.entry
            self.skipping = self.may_skip and self.session.close_enough(self.branch, probe)
            if self.skipping:
                return h + self.session.middle[self.branch]
            self.seam = h.clone()
            self.session.probes[self.branch] = probe
        if self.skipping and self.first < layer <= self.last:
            return h
        return None

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        if layer == self.last and not self.skipping and self.seam is not None:
            self.session.middle[self.branch] = h_out - self.seam
            self.session.skips[self.branch] = 0
        return None


class _Session(Session):
    needs_block_hooks = True
    per_branch = True

    def reset(self) -> None:
        self.probes: dict[str, Tensor] = {}
        self.middle: dict[str, Tensor] = {}
        self.skips: dict[str, int] = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s = self.settings
        if info.step < s.warmup or info.step >= info.num_steps - s.tail:
            return full("warmup" if info.step < s.warmup else "tail")
        if s.threshold <= 0 or self.skips.get(info.branch, 0) >= s.max_skips:
            return full("cap")
        return Decision(mode="blocks", reason="threshold")

    def close_enough(self, branch: str, probe: Tensor) -> bool:
        known = self.probes.get(branch)
        if known is None or branch not in self.middle or known.shape != probe.shape:
            return False
        distance = float(relative_change(probe, known))
        if not math.isfinite(distance):
            self.warn("a step cache distance was not finite; the step was run in full")
            return False
        if distance < self.settings.threshold:
            self.skips[branch] = self.skips.get(branch, 0) + 1
            return True
        return False

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        return _Hooks(self, info.branch, decision.mode == "blocks")

    def footprint(self) -> Footprint:
        return Footprint(hiddens=2)


@dataclass(kw_only=True)
class DBCache(StepCache):
    """Run ``front`` blocks, skip the middle while their residual changes less than ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "the probe sees the fresh noise of each step, not the content"
    name: ClassVar[str] = "dbcache"
    neutral: ClassVar[str] = "dbcache:threshold=0"
    lively: ClassVar[str] = "dbcache:threshold=100,front=1,warmup=1"
    session_type = _Session

    front: int = 2
    """Blocks at the start that are always run."""
    back: int = 0
    """Blocks at the end that are always run."""
    threshold: float = 0.08
    """Relative change of the probe below which the middle is reused; 0 never."""
    warmup: int = 4
    """First steps of a chunk that are always run."""
    tail: int = 0
    """Last steps that are always run."""
    max_skips: int = 4
    """Most partial steps in a row."""

    def __post_init__(self) -> None:
        if self.front < 1 or self.back < 0 or self.threshold < 0 or self.warmup < 1:
            raise StreamvidError(
                f"step cache {self.name!r}: front and warmup must be at least 1, back and threshold at least 0"
            )


@dataclass(kw_only=True)
class FirstBlockCache(DBCache):
    """First-block cache: one probe block, everything after it reused."""

    name: ClassVar[str] = "firstblock"
    neutral: ClassVar[str] = "firstblock:threshold=0"
    lively: ClassVar[str] = "firstblock:threshold=100"

    front: int = 1
    threshold: float = 0.05
    warmup: int = 1
    max_skips: int = 1000

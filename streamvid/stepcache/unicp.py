"""UniCP's error-aware cache window: each layer, at each step, reuses attention only as far back as its
error allows.

A table of the relative error of every layer's attention output against the one 1, 2, ... steps before is
measured on the session's first chunk (full anyway). Later, a layer reuses its last computed output while
the tabulated error at that distance stays below the threshold, so layers and steps with sudden changes have
short windows. The pruning of queries and keys by principal components is a kernel's affair and not done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import NullHooks, relative_change
from streamvid.stepcache.types import BlockHooks, ChunkInfo, Decision, StepInfo


class _Measure(NullHooks):
    """Fills the error table and keeps the outputs it needs for that."""

    def __init__(self, session: _Session, info: StepInfo):
        self.session, self.info = session, info
        self.recent = session.recent.setdefault(info.branch, {})

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        if name == "self_attn":
            known = self.recent.setdefault(layer, [])
            for back, old in enumerate(known, start=1):
                error = relative_change(old, out)
                key = f"{self.info.branch}.{layer}.{self.info.step}.{back}"
                self.session.measured[key] = error
            known.insert(0, out)
            del known[self.session.settings.window :]
        return None


class _Replay(NullHooks):
    """Replays each layer's attention inside its window."""

    def __init__(self, session: _Session, info: StepInfo, may_skip: bool):
        self.session, self.info, self.may_skip = session, info, may_skip
        self.kept = session.kept.setdefault(info.branch, {})

    def before_module(self, layer: int, name: str) -> Tensor | None:
        if name != "self_attn" or not self.may_skip or layer not in self.kept:
            return None
        at, out = self.kept[layer]
        back = self.info.step - at
        error = self.session.errors.get(f"{self.info.branch}.{layer}.{self.info.step}.{back}", float("inf"))
        return out if error < self.session.settings.threshold else None

    def after_module(self, layer: int, name: str, out: Tensor) -> Tensor | None:
        if name == "self_attn":
            self.kept[layer] = (self.info.step, out)
        return None


class _Session(Session):
    static = True
    ties_clips = True
    needs_block_hooks = True
    per_branch = True

    def start(self) -> None:
        self.errors: dict[str, float] = {}
        self.measured: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.recent: dict[str, dict[int, list[Tensor]]] = {}
        self.kept: dict[str, dict[int, tuple[int, Tensor]]] = {}
        self.measured = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if not self.errors:
            return full("calibration")
        return Decision(mode="blocks", reason="threshold")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        if self.chunks_done == 0:
            return _Measure(self, info)
        return _Replay(self, info, decision.mode == "blocks")

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        if self.measured:
            self.errors = {key: float(value) for key, value in self.measured.items()}

    def footprint(self) -> Footprint:
        # The error table is one scalar a layer, step and distance: below one latent for real grids.
        return Footprint(latents=2, hiddens=self.plan.num_layers * (self.settings.window + 1))


@dataclass(kw_only=True)
class UniCP(StepCache):
    """Reuse a layer's self attention as far back as its measured error stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "unicp"
    neutral: ClassVar[str] = "unicp:threshold=0"
    lively: ClassVar[str] = "unicp:threshold=1000"
    knob: ClassVar[tuple[str, ...]] = tuple(f"unicp:threshold={v}" for v in (0, 0.05, 0.2, 0.5, 1000))
    session_type = _Session

    threshold: float = 0.1
    """Relative error of reused attention that is accepted; 0 never reuses."""
    window: int = 3
    """Longest distance in steps that is measured and reused."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.window < 1:
            raise StreamvidError("step cache 'unicp': threshold must be at least 0 and window at least 1")

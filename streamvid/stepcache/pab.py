"""PAB (pyramid attention broadcast): in the flat middle of the steps attention outputs are computed every
few steps.

Cross attention changes least, self attention more; each has its own interval. Outputs are kept for every
layer. diffusers has a hook of this name; it is bound to its own attention modules and keeps state on the
model, so it cannot follow chunks and streams; this is ours, over the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.hooks import ModuleStore
from streamvid.stepcache.types import BlockHooks, Decision, StepInfo


class _Session(Session):
    static = True
    needs_block_hooks = True

    def reset(self) -> None:
        self.outputs: dict[str, dict[str, list[Tensor]]] = {}
        self.ages: dict[str, dict[str, int]] = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        return Decision(mode="blocks", reason="mask") if self._replayed(info) else full("mask")

    def _replayed(self, info: StepInfo) -> tuple[str, ...]:
        s = self.settings
        if not s.low < info.timestep < s.high:
            return ()
        age = self.ages.get(info.branch, {})
        every = {"self_attn": s.self_every, "cross_attn": s.cross_every}
        return tuple(name for name, n in every.items() if name in age and age[name] + 1 < n)

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        replay = self._replayed(info) if decision.mode == "blocks" else ()
        age = self.ages.setdefault(info.branch, {})
        for name in ("self_attn", "cross_attn"):
            age[name] = age[name] + 1 if name in replay else 0
        store = self.outputs.setdefault(info.branch, {})
        return ModuleStore(store, ("self_attn", "cross_attn"), replay)

    def footprint(self) -> Footprint:
        return Footprint(hiddens=2 * self.plan.num_layers)


@dataclass(kw_only=True)
class PyramidBroadcast(StepCache):
    """Compute attention outputs only every few steps in the middle of the run."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    name: ClassVar[str] = "pab"
    neutral: ClassVar[str] = "pab:self_every=1,cross_every=1"
    lively: ClassVar[str] = "pab:low=0,high=1001"
    knob: ClassVar[tuple[str, ...]] = tuple(f"pab:self_every={v},cross_every={v}" for v in (1, 2, 4, 1000))
    session_type = _Session

    self_every: int = 2
    """Self attention runs every so many steps; 1 always."""
    cross_every: int = 6
    """Cross attention runs every so many steps."""
    low: float = 100.0
    """Timesteps at and below this are full."""
    high: float = 800.0
    """Timesteps at and above this are full."""

    def __post_init__(self) -> None:
        if self.self_every < 1 or self.cross_every < 1 or self.low >= self.high:
            raise StreamvidError("step cache 'pab': intervals must be at least 1 and low below high")

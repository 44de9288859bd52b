"""AdaCorrection: each layer decides from its own input whether its kept contribution still holds.

The score is the squared relative change of the layer's input since the contribution was computed, raised
where tokens differ strongly inside; the published blend of cached and fresh values needs the fresh one, so
here a weight below ``threshold`` means reuse and anything else a full recomputation of that layer (a blend
of 0 or 1).
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


def correction_score(now: Tensor, then: Tensor, spatial: float) -> Tensor:
    """``dT^2 (1 + spatial dS)``, both relative to the token norm; a device scalar, 0 for equal inputs.

    ``dT`` is the mean change of a token, ``dS`` the mean spread of its channels. Published as ``dT^2 +
    spatial dS``, which is not scale-free and never 0.
    """
    norm = then.float().norm(dim=-1).mean().clamp_min(1e-12)
    moved = (now.float() - then.float()).norm(dim=-1).mean() / norm
    spread = now.float().std(dim=-1).mean() * math.sqrt(now.shape[-1]) / norm
    return moved.square() * (1 + spatial * spread)


class _Hooks(NullHooks):
    def __init__(self, session: _Session, branch: str, may_skip: bool):
        self.session, self.may_skip = session, may_skip
        self.kept = session.kept.setdefault(branch, {})

    def before_block(self, layer: int, h: Tensor) -> Tensor | None:
        known = self.kept.get(layer)
        if not self.may_skip or known is None or known[0].shape != h.shape:
            return None
        s = self.session.settings
        score = float(s.gain * correction_score(h, known[0], s.spatial))
        if not math.isfinite(score):
            self.session.warn("a step cache distance was not finite; the layer was run in full")
            return None
        return h + known[1] if score < s.threshold else None

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        self.kept[layer] = (h_in.clone(), h_out - h_in)
        return None


class _Session(Session):
    needs_block_hooks = True
    per_branch = True

    def reset(self) -> None:
        self.kept: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s = self.settings
        if info.step < s.warmup or info.step >= info.num_steps - s.tail:
            return full("warmup" if info.step < s.warmup else "tail")
        return Decision(mode="blocks", reason="threshold") if s.threshold > 0 else full("threshold")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        return _Hooks(self, info.branch, decision.mode == "blocks")

    def footprint(self) -> Footprint:
        return Footprint(hiddens=2 * self.plan.num_layers)


@dataclass(kw_only=True)
class AdaCorrection(StepCache):
    """Reuse a layer's contribution while the corrected change of its input stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "a layer's input changes with the fresh noise of each step"
    name: ClassVar[str] = "adacorrection"
    neutral: ClassVar[str] = "adacorrection:threshold=0"
    lively: ClassVar[str] = "adacorrection:threshold=1000000"
    session_type = _Session

    threshold: float = 0.01
    """Blend weight below which the kept contribution is used; 0 never."""
    gain: float = 1.0
    """Factor from score to blend weight."""
    spatial: float = 1.0
    """Weight of the spread inside tokens."""
    warmup: int = 2
    """First steps of a chunk that are always full."""
    tail: int = 1
    """Last steps that are always full."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.gain <= 0 or self.spatial < 0 or self.warmup < 1:
            raise StreamvidError(
                "step cache 'adacorrection': threshold and spatial must be at least 0, gain positive, "
                "warmup at least 1"
            )

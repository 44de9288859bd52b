"""FlowCache: every chunk has its own accumulator, fed by the relative change of its own input.

Its MAGI variant compares the embedded latent from step to step; the embedding is linear, and the latent
itself is compared here. In a stream with one chunk in flight the chunk-wise rule is what every session does
(state starts anew with each chunk); what remains of FlowCache is its distance, its warm-up and its last
full step. What one chunk tells of the next is ``carry`` (and, for few steps, ``motion`` and ``blockmap``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.accumulate import AccumulatingSession
from streamvid.stepcache.base import Footprint, StepCache
from streamvid.stepcache.hooks import relative_change
from streamvid.stepcache.types import StepInfo


class _Session(AccumulatingSession):
    def reset(self) -> None:
        super().reset()
        self.newest: dict[str, Tensor] = {}
        self.change: dict[str, Tensor] = {}

    def watch(self, info: StepInfo, x_t: Tensor) -> None:
        before = self.newest.get(info.branch)
        if before is not None and before.shape == x_t.shape:
            self.change[info.branch] = relative_change(x_t, before)
        self.newest[info.branch] = x_t

    def distance(self, info: StepInfo, x_t: Tensor) -> float:
        return float(self.change.get(info.branch, float("inf")))

    def footprint(self) -> Footprint:
        return Footprint(latents=2, hiddens=1)


@dataclass(kw_only=True)
class FlowCache(StepCache):
    """Skip while the summed relative change of the chunk's latent stays below ``threshold``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "every indicator that looks at the input sees the fresh noise, not the content"
    name: ClassVar[str] = "flowcache"
    neutral: ClassVar[str] = "flowcache:threshold=0"
    lively: ClassVar[str] = "flowcache:threshold=100"
    knob: ClassVar[tuple[str, ...]] = tuple(f"flowcache:threshold={v},max_skips=1000" for v in (0, 0.05, 100))
    session_type = _Session

    threshold: float = 0.1
    """Summed distance at which a step is run; 0 never skips."""
    warmup: int = 5
    """First steps of a chunk that are always run."""
    tail: int = 1
    """Last steps that are always run."""
    max_skips: int = 4
    """Most skips in a row."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.warmup < 1 or self.tail < 0:
            raise StreamvidError(
                "step cache 'flowcache': threshold and tail must be at least 0, warmup at least 1"
            )

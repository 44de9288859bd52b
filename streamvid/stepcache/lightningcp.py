"""Reuse of static regions in many-step sampling (after LightningCP): between full steps only moving tokens
run.

LightningCP caches features of talking heads and attends to the foreground only. Here the foreground is
where the clean prediction moves between frames or still changes between steps; the rest keeps its last x0,
which along one deterministic trajectory is a longer step of its own, not an error in noise. Its parallel
prediction of several steps needs many frozen layers and is not done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.motion import change_map, motion_map, normalise, select_tokens
from streamvid.stepcache.types import ChunkInfo, Decision, StepInfo


class _Session(Session):
    static = True
    ties_clips = True
    keeps = ("x0",)
    depth = 2

    def start(self) -> None:
        self.last_frame: Tensor | None = None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s, entries = self.settings, self.history(info.branch)
        if info.step < s.warmup or info.step >= info.num_steps - s.tail or len(entries) < 2:
            return full("warmup" if info.step < s.warmup else "tail")
        if (info.step - s.warmup) % s.interval == 0 or s.ratio >= 1:
            return full("mask")
        newest, older = entries[0].values["x0"], entries[1].values["x0"]
        score = normalise(motion_map(newest, self.last_frame, info.patch))
        score = score + normalise(change_map(newest, older, info.patch))
        tokens = select_tokens(score, s.ratio, vote=True, dilate=s.dilate)
        return Decision(mode="subset", reason="mask", tokens=tokens)

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        self.last_frame = x0[:, -1].clone()

    def on_context_change(self, kind: str) -> None:
        super().on_context_change(kind)
        self.last_frame = None

    def footprint(self) -> Footprint:
        return Footprint(latents=3)


@dataclass(kw_only=True)
class StaticRegions(StepCache):
    """Run the ``ratio`` of tokens that move on all but every ``interval``-th step."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "use tokens, the same idea for re-noised steps"
    name: ClassVar[str] = "lightningcp"
    neutral: ClassVar[str] = "lightningcp:ratio=1"
    lively: ClassVar[str] = "lightningcp:ratio=0.5,warmup=2"
    knob: ClassVar[tuple[str, ...]] = tuple(f"lightningcp:ratio={v}" for v in (1, 0.75, 0.5, 0.25))
    session_type = _Session

    ratio: float = 0.4
    """Share of tokens run on partial steps."""
    interval: int = 3
    """One full step in so many."""
    warmup: int = 4
    """First steps of a chunk that are always full."""
    tail: int = 1
    """Last steps that are always full."""
    dilate: int = 1
    """Tokens by which the selection is widened."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.interval < 1 or self.warmup < 2 or self.dilate < 0:
            raise StreamvidError(
                "step cache 'lightningcp': ratio must be in (0, 1], interval at least 1, warmup at least 2"
            )

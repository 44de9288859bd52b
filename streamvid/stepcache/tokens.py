"""Token-subset steps (MotionCache, made exact): middle steps run on the tokens that move, the others keep x0.

MotionCache weighs a per-token error accumulator by motion; with a handful of steps the useful part is
running a subset of tokens. Deviations: tokens are ranked and a fixed share is taken (static sizes, no
device sync); unlisted tokens keep their x0 and are re-noised as usual, so no trunk residual is kept;
modulation and rotary rows are gathered by the same index as the tokens (the released code takes the first
rows instead).
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
        s, last = self.settings, self.plan.num_steps - 1
        self.steps = s.steps or tuple(range(1, last))
        if any(not 0 < step <= last for step in self.steps):
            raise StreamvidError(f"step cache 'tokens': steps={list(s.steps)} must lie in 1..{last}")
        self.last_frame: Tensor | None = None

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        settings = self.settings
        if info.step not in self.steps or settings.ratio >= 1:
            return full("mask")
        entries = self.history(info.branch)
        newest = entries[0].values["x0"]
        score = normalise(motion_map(newest, self.last_frame, info.patch))
        if len(entries) > 1:
            score = score + normalise(change_map(newest, entries[1].values["x0"], info.patch))
        tokens = select_tokens(
            score, settings.ratio, vote=settings.vote, dilate=settings.dilate, multiple=settings.multiple
        )
        return Decision(mode="subset", reason="mask", tokens=tokens)

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        self.last_frame = x0[:, -1].clone()

    def on_context_change(self, kind: str) -> None:
        super().on_context_change(kind)
        self.last_frame = None

    def footprint(self) -> Footprint:
        return Footprint(latents=3)


@dataclass(kw_only=True)
class TokenSubset(StepCache):
    """Run the given steps on the share ``ratio`` of tokens that move or still change."""

    kinds: ClassVar[frozenset[str]] = frozenset({"fresh"})
    why_not: ClassVar[str] = "tokens left out would keep a stale velocity; use lightningcp"
    name: ClassVar[str] = "tokens"
    neutral: ClassVar[str] = "tokens:ratio=1"
    lively: ClassVar[str] = "tokens:ratio=0.5"
    knob: ClassVar[tuple[str, ...]] = tuple(f"tokens:ratio={v}" for v in (1, 0.75, 0.5, 0.25))
    session_type = _Session

    ratio: float = 0.5
    """Share of tokens that are run; 1 runs all."""
    steps: tuple[int, ...] = ()
    """Steps run on a subset; empty: all but the first and the last."""
    vote: bool = True
    """Choose places for all frames of the chunk at once, by majority of its frames."""
    dilate: int = 1
    """Tokens by which the selection is widened."""
    multiple: int = 1
    """Round the number of tokens (of places, with vote) up to a multiple of this."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.dilate < 0 or self.multiple < 1:
            raise StreamvidError(
                "step cache 'tokens': ratio must be in (0, 1], dilate at least 0, multiple at least 1"
            )

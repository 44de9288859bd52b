"""Maps carried across chunks (FlowCache): what changed little in a measured chunk is skipped in the ones after it.

FlowCache adds up the relative L1 change of a chunk's own input and skips while the sum stays below a
threshold. With fresh noise in every step the input shows noise, not content, so the change of the clean prediction is
taken instead, and that is known only after a step was paid for. It is therefore measured in one full chunk, for
every step and place (a token of all frames), and carried: the accumulators of the next chunks are run on the
carried map, before sampling starts. The other part that is carried is where things move, from the finished
chunk before: a place that moves now counts at least as much as moving places changed when the map was
measured, so that an object that comes to a place that was still is not kept from it.

A place that is skipped keeps its x0, which is re-noised with the noise a full step would have had; no velocity
and no residual is ever reused. The first chunk, the one after every change of context and every
``refresh``-th one are full and measured.

Source: FlowCache (chunk-wise caching for autoregressive video; defaults there: threshold 0.01 to 0.15, warm-up 5 of 50
steps). Deviations: distance in x0 space and from an earlier chunk; one accumulator a place (MotionCache) as well as
one a chunk (``scope=chunk``, FlowCache's own grain); its KV compression is a matter of memory policies and not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.motion import change_map, motion_map, spread
from streamvid.stepcache.types import ChunkInfo, Decision, StepInfo, StepOutput

STILL = 0.01
"""Difference between frames, of the mean level of the latents, below which the largest one is not full motion."""


def carried_plan(distance: Tensor, threshold: float, skippable: range) -> Tensor:
    """Which places are run in which step: FlowCache's accumulator on known distances.

    Args:
        distance: ``[steps, rows, cols]``, change of x0 by step; that of step 0 is not used.
        threshold: a place is run when the sum since it was last run reaches this.
        skippable: steps that may be skipped; places are run in all others.

    Returns:
        bool ``[steps, rows, cols]``.
    """
    plan = torch.ones_like(distance, dtype=torch.bool)
    total = torch.zeros_like(distance[0])
    for step in skippable:
        total = total + distance[step]
        plan[step] = ~(total < threshold)  # so that what is not a number is run
        total = total.masked_fill(plan[step], 0.0)
    return plan


class _Session(Session):
    # Plans are made at the end of a chunk, when it is handed over anyway; decisions read numbers on the host.
    static = True
    ties_clips = True
    keeps = ("x0",)

    def start(self) -> None:
        s, steps = self.settings, self.plan.num_steps
        self.selects_tokens = s.scope == "places"
        self.begin, self.end = s.warmup, max(s.warmup, steps - s.tail)
        self.changes: dict[int, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self.last_frame: Tensor | None = None
        self.measured: Tensor | None = None
        """Relative change of x0 by step and place ``[steps, rows, cols]``."""
        self.moving: Tensor | None = None
        """The same of places that moved ``[steps]``."""
        self.places: Tensor | None = None
        """The plan for the next chunk, bool ``[steps, rows, cols]``; None: it is measured."""
        self.counts: list[int] = []
        self.age = 0

    def reset(self) -> None:
        self.changes = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        if self.places is None:
            return full("refresh")
        frames, height, width = x_t.shape[1], x_t.shape[3], x_t.shape[4]
        rows, cols = height // info.patch[0], width // info.patch[1]
        if self.places.shape[1:] != (rows, cols):
            return full("shape")
        if not self.begin <= info.step < self.end:
            return full("warmup" if info.step < self.begin else "tail")
        count = self.counts[info.step]
        if count == rows * cols:
            return full("threshold")
        if count == 0:
            return Decision(mode="reuse", space="x0", reason="threshold")
        # The number is known on the host, so the indices of the places need no wait for the device.
        chosen = self.places[info.step].flatten().float().topk(count).indices.sort().values
        first = torch.arange(frames, device=chosen.device)[:, None] * (rows * cols)
        return Decision(mode="subset", reason="threshold", tokens=(first + chosen[None]).flatten())

    def observe(self, info: StepInfo, x_t: Tensor, out: StepOutput, decision: Decision) -> Tensor | None:
        before = self.history(info.branch)
        whole = decision.mode in ("full", "merge_clean", "blocks")
        if info.branch == "cond" and before and whole and x_t.shape[0] == 1:
            old = before[0].values["x0"]
            change = change_map(out.x0, old, info.patch).mean(0)
            self.changes[info.step] = change / old.float().abs().mean().clamp_min(1e-12)
        return None

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        if x0.shape[0] > 1:
            return
        s, steps = self.settings, self.plan.num_steps
        motion = motion_map(x0, self.last_frame, self.plan.patch).amax(0)
        level = torch.maximum(motion.max(), STILL * x0.float().abs().mean()).clamp_min(1e-12)
        motion = spread(motion / level, s.dilate)
        self.last_frame = x0[:, -1].clone()
        self.age += 1
        complete = set(self.changes) >= set(range(1, steps))
        if complete or (self.places is None and self.changes):
            # A step that another cache of a stack skipped has no measure; carried on its own, it is run.
            unknown = torch.full_like(motion, math.inf)
            rest = [self.changes.get(step, unknown) for step in range(1, steps)]
            self.measured = torch.stack([torch.zeros_like(motion), *rest])
            self.moving = (self.measured * motion).sum((1, 2)) / motion.sum().clamp_min(1e-12)
            self.age = 0
        self.places, self.counts = None, []
        if self.measured is None or self.moving is None or self.age >= s.refresh - 1:
            return
        if self.measured.shape[1:] != motion.shape:
            return
        distance = torch.maximum(spread(self.measured, s.dilate), motion * self.moving[:, None, None])
        if s.scope == "chunk":
            distance = distance.mean((1, 2), keepdim=True).expand_as(distance)
        self.places = carried_plan(distance, s.threshold, range(self.begin, self.end))
        self.counts = self.places.flatten(1).sum(1).tolist()

    def on_context_change(self, kind: str) -> None:
        super().on_context_change(kind)
        self._forget()

    def footprint(self) -> Footprint:
        return Footprint(latents=3)


@dataclass(kw_only=True)
class CarriedMaps(StepCache):
    """Skip, in the chunks after a measured one, the places whose x0 changed little there and where nothing moves."""

    name: ClassVar[str] = "carry"
    neutral: ClassVar[str] = "carry:threshold=0"
    lively: ClassVar[str] = "carry:threshold=1.2,dilate=0"
    knob: ClassVar[tuple[str, ...]] = tuple(f"carry:threshold={v}" for v in (0, 0.5, 1, 1000))
    session_type = _Session

    threshold: float = 0.1
    """Summed relative change of x0 at which a place is run again; 0 never skips."""
    scope: Literal["places", "chunk"] = "places"
    """``places``: each place has its own sum; ``chunk``: whole steps are skipped, by the mean."""
    refresh: int = 4
    """One chunk in so many is full and measured; 1 skips nothing."""
    warmup: int = 1
    """First steps of a chunk that are always full."""
    tail: int = 1
    """Last steps that are always full."""
    dilate: int = 1
    """Places by which change and motion are widened, so that edges are run with their object."""

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.refresh < 1 or self.warmup < 1 or self.tail < 0 or self.dilate < 0:
            raise StreamvidError(
                "step cache 'carry': threshold, tail and dilate must be at least 0, refresh and warmup at least 1"
            )
        if self.scope not in ("places", "chunk"):
            raise StreamvidError(f"step cache 'carry': scope must be 'places' or 'chunk', got {self.scope!r}")

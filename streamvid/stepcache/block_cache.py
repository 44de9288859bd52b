"""Block caching after a profile (ProfilingDiT): blocks whose contribution hardly changes are skipped
between steps.

ProfilingDiT sorts blocks by whether their attention rests on foreground or background and caches the
latter. Without segmentation the measure is what that split stands for: how little a block turns the stream
(1 - cosine of its input and output) times how much its contribution changes from step to step. The profile
is taken on the session's first chunk, which is full anyway, or read from a calibration file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamvid.errors import StreamvidError
from streamvid.stepcache.base import Footprint, Session, StepCache, full
from streamvid.stepcache.block_deltas import BlockDeltas
from streamvid.stepcache.calibration import load_for
from streamvid.stepcache.hooks import relative_change
from streamvid.stepcache.types import BlockHooks, ChunkInfo, Decision, StepInfo


class ProfileHooks(BlockDeltas):
    """Keeps all deltas and adds up each block's importance."""

    def __init__(self, store: dict[int, Tensor], importance: dict[int, Tensor], layers: int):
        super().__init__(store, range(layers))
        self.importance = importance

    def after_block(self, layer: int, h_in: Tensor, h_out: Tensor) -> Tensor | None:
        known = self.store.get(layer)
        super().after_block(layer, h_in, h_out)
        if known is not None and known.shape == h_out.shape:
            turn = 1 - torch.cosine_similarity(h_in.float(), h_out.float(), dim=-1).mean()
            value = turn * relative_change(self.store[layer], known)
            self.importance[layer] = self.importance.get(layer, 0.0) + value
        return None


def least_important(importance: dict[int, float], share: float) -> tuple[int, ...]:
    """The ``share`` of layers with the smallest importance, rounded down, in order."""
    ranked = sorted(importance, key=lambda layer: (importance[layer], layer))
    return tuple(sorted(ranked[: int(share * len(ranked))]))


class _Session(Session):
    static = True
    needs_block_hooks = True

    def start(self) -> None:
        self.ties_clips = self.settings.file is None
        self.skip: tuple[int, ...] = ()
        self.importance: dict[int, Tensor] = {}
        if self.settings.file is not None:
            values = load_for(self, self.settings.file, ["block_importance"])
            if values is not None:
                table = dict(enumerate(values["block_importance"]))
                self.skip = least_important(table, self.settings.share)

    def reset(self) -> None:
        self.deltas: dict[str, dict[int, Tensor]] = {}
        self.importance = {}

    def decide(self, info: StepInfo, x_t: Tensor) -> Decision:
        s = self.settings
        if info.step < s.warmup or info.step >= info.num_steps - s.tail:
            return full("warmup" if info.step < s.warmup else "tail")
        if (info.step - s.warmup) % s.interval == 0 or not self.skip:
            return full("mask")
        return Decision(mode="blocks", reason="mask")

    def block_hooks(self, info: StepInfo, decision: Decision) -> BlockHooks:
        store = self.deltas.setdefault(info.branch, {})
        if self.settings.file is None and self.chunks_done == 0:
            return ProfileHooks(store, self.importance, self.plan.num_layers)
        return BlockDeltas(store, self.skip, self.skip if decision.mode == "blocks" else ())

    def finish(self, chunk: ChunkInfo, x0: Tensor) -> None:
        if self.importance:
            table = {layer: float(value) for layer, value in self.importance.items()}
            self.skip = least_important(table, self.settings.share)

    def footprint(self) -> Footprint:
        return Footprint(hiddens=self.plan.num_layers, latents=1)


@dataclass(kw_only=True)
class BlockCache(StepCache):
    """Skip the ``share`` of blocks that matter least, except every ``interval``-th step."""

    kinds: ClassVar[frozenset[str]] = frozenset({"same"})
    why_not: ClassVar[str] = "a block's kept contribution answers to the previous step's noise"
    name: ClassVar[str] = "blocks"
    neutral: ClassVar[str] = "blocks:share=0"
    lively: ClassVar[str] = "blocks:share=0.75,warmup=1"
    knob: ClassVar[tuple[str, ...]] = tuple(f"blocks:share={v}" for v in (0, 0.25, 0.5, 0.75, 1))
    session_type = _Session

    share: float = 0.5
    """Share of the blocks that are cached."""
    interval: int = 3
    """One full step in so many; 1 caches nothing."""
    warmup: int = 3
    """First steps of a chunk that are always full."""
    tail: int = 1
    """Last steps that are always full."""
    file: str | None = None
    """Calibration file holding block importances; None measures them on the first chunk."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.interval < 1 or self.warmup < 1:
            raise StreamvidError("step cache 'blocks': share must be in 0..1, interval and warmup at least 1")

"""SWIFT: a prompt change without re-encoding, by bridge and anchor tokens, and a window that is wide around changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute

BRIDGE, ANCHORS = "bridge", "anchors"
FADE, GONE = 0.85, 1e-3


def bridge_token(summary: Tensor, change: Tensor, rho: float) -> Tensor:
    """``(1 - g) * summary + g * change`` with ``g = rho * max(0, cos)``, for every head alone (``[b, heads, d]``)."""
    gate = rho * F.cosine_similarity(summary, change, dim=-1).clamp_min(0)[..., None]
    return (1 - gate) * summary + gate * change


def without(change: Tensor, motion: Tensor) -> Tensor:
    """``change`` less its component along ``motion``."""
    along = (change * motion).sum(-1, keepdim=True) / motion.square().sum(-1, keepdim=True).clamp_min(1e-12)
    return change - along * motion


@dataclass(kw_only=True)
class Swift(MemoryPolicy):
    """Sink, segment anchors, bridge tokens and an adaptive window of the newest frames, at absolute positions.

    SWIFT (training-free, LongLive weights). At a prompt change every layer gets two bridge tokens (means of the values
    of the newest frames and of the sink, moved towards the difference of the prompts where they already point that
    way) and one anchor (the segment's mean values with the old prompt); used as keys and values alike, never rotated.
    Bridges fade by 0.85 a chunk. The window has ``size`` frames at a change and shrinks towards ``shortest`` with age.
    The tiers by distance of the prompts (re-cache, micro re-cache, bridge only) are the transition ``swift``.

    Deviations: time to the next prompt change is not used, as a live stream does not know it; frames are held for the
    full window, so the short window saves time, not bytes.
    """

    size: int = 12
    """Latent frames a chunk attends to at most, itself included."""
    shortest: int = 7
    """The same, long after a change."""
    sink: int = 3
    fade: float = 18.0
    """Latent frames over which the window shrinks by a factor e."""
    anchors: int = 4
    """Segment anchors held; 0 for none."""
    bridge: float = 1.0
    """Scale of new bridge tokens; 0 for none."""

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        if self.sink < 0 or not self.sink + chunk_frames <= self.shortest <= self.size:
            raise ValueError(
                f"swift: needs sink + chunk <= shortest <= size, got {self.sink} + {chunk_frames}, {self.shortest}, "
                f"{self.size} latent frames"
            )
        if self.fade <= 0 or self.anchors < 0 or self.bridge < 0:
            raise ValueError(
                f"swift: needs fade > 0, anchors >= 0 and bridge >= 0, got {self.fade}, {self.anchors}, {self.bridge}"
            )

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        side = sum(-(-n // geometry.tokens_per_frame) for n in (2 * (self.bridge > 0), self.anchors) if n)
        return self.size + side

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        changed = max((entry.tags.get("changed", 0) for entry in bank.entries), default=0)
        width = self.shortest + (self.size - self.shortest) * math.exp(-(chunk.start - changed) / self.fade)
        shown = bank.newest(
            max(round(width), self.sink + chunk.count) - (chunk.count - chunk.skip), keep="sink"
        )
        keep = {id(entry) for entry in shown}
        visible = [e for e in bank.entries if id(e) in keep or e.region in (BRIDGE, ANCHORS)]
        times, query = absolute(visible, chunk)
        return Plan(visible, times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        kept = {id(entry) for entry in bank.newest(self.size - chunk.next_count, keep="sink")}
        side = {id(entry) for entry in bank.entries if entry.region in (BRIDGE, ANCHORS)}
        bank.keep([entry for entry in bank.entries if id(entry) in kept | side])
        for entry in [e for e in bank.entries if e.region == BRIDGE]:
            entry.tags["scale"] *= FADE
            if entry.tags["scale"] < GONE:
                bank.drop([entry])
            else:
                bank.overwrite(entry, *(x * FADE for x in bank.read(entry)))

    def on_prompt(self, bank: Bank, event: dict[str, Any]) -> None:
        """``event``: ``old`` and ``new``, prompt signatures ``[b | 1, heads, d]``; ``rho``, their distance 0 to 1."""
        frames = [entry for entry in bank.entries if entry.frames]
        if len(frames) < 2:
            return
        old, new = (self._signature(bank, event[name]) for name in ("old", "new"))
        values = [bank.read(entry)[1].float().mean(dim=1) for entry in frames]
        changed = 1 + max(frame for entry in frames for frame in entry.frames)
        at = sum(entry.region == "sink" for entry in bank.entries)
        if self.anchors:
            self._anchor(bank, 0.8 * (0.65 * torch.stack(values[-6:]).mean(0) + 0.35 * old), changed, at)
        if self.bridge:
            change = without(new - old, values[-1] - values[-2])
            sinks = [v for v, entry in zip(values, frames, strict=True) if entry.region == "sink"] or values[
                :1
            ]
            summaries = (torch.stack(values[-2:]).mean(0), torch.stack(sinks).mean(0))
            tokens = torch.stack([bridge_token(s, change, float(event["rho"])) for s in summaries], dim=1)
            bank.drop([entry for entry in bank.entries if entry.region == BRIDGE])
            entry = self._side(bank, self.bridge * tokens, BRIDGE, changed, at + (self.anchors > 0))
            entry.tags["scale"] = 1.0

    def _anchor(self, bank: Bank, token: Tensor, changed: int, at: int) -> None:
        held = [entry for entry in bank.entries if entry.region == ANCHORS]
        tokens = token[:, None]
        if held:
            tokens = torch.cat([bank.read(held[0])[1].float(), tokens], dim=1)[:, -self.anchors :]
            bank.drop(held)
        self._side(bank, tokens, ANCHORS, changed, at)

    def _side(self, bank: Bank, tokens: Tensor, region: str, changed: int, at: int) -> Entry:
        tokens = tokens.to(bank.geometry.dtype)
        entry = bank.add(tokens, tokens, region=region, t=(0.0,), rope=False, at=at)
        entry.tags["changed"] = changed
        return entry

    def _signature(self, bank: Bank, signature: Tensor) -> Tensor:
        signature = signature.float().expand(bank.geometry.batch, -1, -1)
        return signature if bank.head_index is None else signature.index_select(1, bank.head_index)

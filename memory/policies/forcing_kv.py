"""Forcing-KV: heads that look only nearby keep two frames, the others also the parts of the picture that change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from streamvid.kernels.rope import rope_table, rotate
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.heads import HeadProfile, groups_by_label
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, store, tokens_of, top

STATIC, DYNAMIC = "static", "dynamic"


def turned_keys(tokens: Tokens, start: float) -> Tensor:
    """Keys at their temporal and spatial positions, frames counted from ``start`` (only differences matter)."""
    placed = tokens.positions.to(torch.float64) - torch.tensor([start, 0.0, 0.0], dtype=torch.float64).to(
        tokens.positions.device
    )
    return rotate(tokens.k, rope_table(placed, tokens.k.shape[-1], torch.complex128))


@dataclass(kw_only=True)
class ForcingKV(MemoryPolicy):
    """Two groups of heads a layer: static ones see sink and newest frames; dynamic ones also the changed patches.

    Forcing-KV (training-free; the head profile is of one checkpoint). In layer 0, and everywhere until chunk ``start``
    has been committed, all heads keep sink and newest frames. Afterwards, at every commit, each frame that leaves the
    dynamic heads' newest frames is compared with the frame after it, in ``patches`` runs of tokens; the ``keep`` share
    of runs least like their successor replaces the dynamic part. Layer 1 decides for all later layers.

    Without a profile every head is dynamic. Deviations: batch items decide for themselves (published: item 0 decides
    for all); the published ring buffers mix up keys and values for contexts longer than a chunk, ours do not.
    """

    profile: str | None = None
    """Head profile file with the labels of forcing_kv; None: all heads dynamic."""
    sink: int = 1
    spatial: int = 1
    """Newest frames of static heads."""
    temporal: int = 1
    """Newest frames of dynamic heads."""
    patches: int | None = None
    """Runs of tokens a frame is divided into; 0: no dynamic part; None: the divisor of a frame's tokens nearest 6."""
    keep: float = 0.33
    """Share of runs kept, of a chunk's worth of frames."""
    start: int = 1
    """Index of the chunk with whose commit the groups part."""

    def __post_init__(self) -> None:
        self._labels = HeadProfile.load(self.profile) if self.profile else None
        self.last_scores: Tensor | None = (
            None  # for inspection only: similarity of each run at the last update
        )

    @classmethod
    def of(cls, profile: HeadProfile, **settings) -> ForcingKV:
        """The policy with a profile at hand instead of in a file."""
        policy = cls(**settings)
        policy._labels = profile
        return policy

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        patches = self._patches(geometry.tokens_per_frame)
        if self.sink < 0 or self.spatial < 1 or self.temporal < 1 or self.start < 0 or patches < 0:
            raise ValueError(
                "forcing_kv: needs sink >= 0, spatial >= 1, temporal >= 1, patches >= 0 and start >= 0, got "
                f"{self.sink}, {self.spatial}, {self.temporal}, {patches}, {self.start}"
            )
        if patches and geometry.tokens_per_frame % patches:
            raise ValueError(
                f"forcing_kv: {geometry.tokens_per_frame} tokens a frame are not divisible into patches={patches} "
                f"runs; choose a divisor, for example {_divisor(geometry.tokens_per_frame, patches)}"
            )
        if patches and not 1 <= round(chunk_frames * patches * self.keep) <= chunk_frames * patches:
            raise ValueError(f"forcing_kv: keep={self.keep} keeps no run of tokens, or more than there are")
        if self._labels:
            self._labels.check(geometry)
            self._labels.of("forcing_kv")

    def _patches(self, tokens: int) -> int:
        return _divisor(tokens, 6) if self.patches is None else self.patches

    def groups(self, geometry: KVGeometry) -> Sequence[Sequence[Sequence[int]]] | None:
        everyone = list(range(geometry.heads))
        if not self._labels:
            return [[everyone]] + [[[], everyone]] * (geometry.layers - 1)
        labels = self._labels.of("forcing_kv")
        return [[everyone]] + [groups_by_label(row, (STATIC, DYNAMIC)) for row in labels[1:]]

    def _role(self, bank: Bank) -> str:
        if bank.layer == 0:
            return "plain"
        if not self._labels:
            return DYNAMIC
        return self._labels.of("forcing_kv")[bank.layer][bank.heads[0] if bank.heads else 0]

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        patches = self._patches(geometry.tokens_per_frame)
        extra = -(-round(chunk_frames * patches * self.keep) // patches) if patches else 0
        return self.sink + max(self.spatial, self.temporal) + chunk_frames + extra

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        times, query = absolute(bank.entries, chunk)
        return Plan(list(bank.entries), times, query)

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        bank.mark_sink(self.sink)
        role = self._role(bank)
        parted = chunk.index >= self.start and role != "plain"
        newest = max(self.spatial, self.temporal)
        if parted:
            newest = self.spatial if role == STATIC else self.temporal
        recent = [entry for entry in bank.entries if entry.region == "recent"]
        leave = recent[: max(0, len(recent) - newest)]
        if role == DYNAMIC and chunk.index > self.start and self.patches != 0 and leave:
            self._update(bank, chunk, leave, recent[len(leave)])
        else:
            bank.drop(leave)

    def _update(self, bank: Bank, chunk: Chunk, leave: list[Entry], after: Entry) -> None:
        """Replace the dynamic part by the changed runs of the frames that leave."""
        candidates = tokens_of(bank, leave)
        size = bank.tokens_per_frame
        patches = self._patches(size)
        if "forcing_kv" not in chunk.shared:
            chain = turned_keys(tokens_of(bank, [*leave, after]), float(leave[0].frames[0])).flatten(2)
            frames = chain.unflatten(1, (-1, size)).float()
            alike = F.cosine_similarity(frames[:, :-1], frames[:, 1:], dim=-1)
            scores = alike.unflatten(2, (patches, -1)).mean(dim=3)
            self.last_scores = scores
            chunk.shared["forcing_kv"] = top(-scores.flatten(1), round(len(leave) * patches * self.keep))
        runs = chunk.shared["forcing_kv"]
        length = size // patches
        rows = (runs[..., None] * length + torch.arange(length, device=runs.device)).flatten(1)
        kept = candidates.take(rows[..., None].expand(-1, -1, bank.num_heads))
        held = [entry for entry in bank.entries if entry.region == "memory"]
        bank.drop(leave)
        if held and held[0].length != kept.k.shape[1]:
            bank.drop(held)
            held = []
        sinks = sum(entry.region == "sink" for entry in bank.entries)
        store(bank, kept, held[0] if held else None, region="memory", origin=float(chunk.start), at=sinks)


def _divisor(tokens: int, wanted: int) -> int:
    return min((d for d in range(1, tokens + 1) if tokens % d == 0), key=lambda d: abs(d - wanted))

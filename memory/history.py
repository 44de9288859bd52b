"""What a cache has committed: the banks, and everything that may happen to them between chunks.

`KVCache` adds the chunk in progress. Knows tokens, frames and heads; no model, no prompt, no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from streamvid.kernels.rope import GridRope
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.packing import split_spans
from streamvid.memory.policy import Chunk, MemoryPolicy
from streamvid.memory.report import MemoryReport, measure
from streamvid.memory.sparse import SparseMaps
from streamvid.memory.view import Scratch, View

Phase = Literal["idle", "noisy", "context"]


class History:
    """The committed part of a cache. Not used on its own."""

    geometry: KVGeometry
    policy: MemoryPolicy
    codec: Any
    chunk_frames: int
    retain: bool
    banks: list[list[Bank]]
    """For each layer, one bank a group of heads."""
    phase: Phase
    chunk: Chunk | None
    next_frame: int
    """Absolute latent frame at which the next chunk begins."""
    num_chunks: int
    """Chunks committed, re-encoded ones not counted again."""
    newest: int
    """The largest ``next_frame`` so far: frames below it that are committed are being encoded again."""
    sparse: SparseMaps | None
    """Block maps of the chunk in progress; None where attention is dense."""
    rope: GridRope
    scratch: Scratch
    views: dict[tuple[int, int], View]
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]]
    peak: int

    def all_banks(self) -> Iterator[Bank]:
        """Every bank, in order of layers."""
        for row in self.banks:
            yield from row

    def abort(self) -> None:
        """Drop the chunk in progress."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything; storage stays allocated, so that a new clip costs no allocation."""
        self.abort()
        for bank in self.all_banks():
            bank.clear()
        self.next_frame = self.num_chunks = self.newest = 0

    def num_sink_frames(self) -> int:
        """Latent frames held in the region "sink", by the bank that holds most of them."""
        return max(
            sum(entry.num_frames for entry in bank.entries if entry.region == "sink")
            for bank in self.all_banks()
        )

    def rebuild(self, start: int, *, keep_sink: bool = False) -> None:
        """Forget the history in order to encode it again, from latent frame ``start`` on (prompt change: re-cache).

        The caller then runs context passes over the clean latents from ``start`` on: all in one chunk (LongLive's
        bidirectional re-cache) or chunk by chunk (causal re-cache). With ``keep_sink`` the sink's entries stay; give
        ``begin_chunk(frames, skip=sink frames)`` so that the first frames run as queries only, as LongLive does when
        the sink is global and the re-cached range does not begin with it.
        """
        self._require("idle", "rebuild")
        SparseMaps.forget(self.all_banks())
        if start < 0:
            raise ValueError(f"rebuild must start at a latent frame of 0 or more, got {start}")
        for bank in self.all_banks():
            sink = [entry for entry in bank.entries if entry.region == "sink"] if keep_sink else []
            bank.keep(sink)
            if not keep_sink:
                bank.clear()
        self.next_frame = start

    def rewind(self, frames: int) -> None:
        """Forget the newest ``frames`` latent frames, to encode them again (micro re-cache of the last chunk)."""
        self._require("idle", "rewind")
        SparseMaps.forget(self.all_banks())
        if not 0 < frames <= self.next_frame:
            raise ValueError(f"rewind needs 1 to {self.next_frame} latent frames, got {frames}")
        first = self.next_frame - frames
        for bank in self.all_banks():
            split_spans(bank, first)
            bank.drop([entry for entry in bank.entries if entry.frames and entry.frames[0] >= first])
        self.next_frame = first

    def flush(self, keep: int = 0, *, sink: bool = True) -> None:
        """Forget all but the sink (if ``sink``) and the newest ``keep`` frames: immediate response to a new prompt."""
        self._require("idle", "flush")
        SparseMaps.forget(self.all_banks())
        if keep < 0:
            raise ValueError(f"flush keeps 0 or more latent frames, got {keep}")
        for bank in self.all_banks():
            split_spans(bank, self.next_frame - keep)
            pinned = [e for e in bank.entries if sink and e.region == "sink"]
            rest = [e for e in bank.entries if e not in pinned and e.frames]
            newest: list[Entry] = []
            while rest and sum(e.num_frames for e in newest) + rest[-1].num_frames <= keep:
                newest.append(rest.pop())
            bank.keep(pinned + newest)

    def prompt_changed(self, event: dict[str, Any]) -> None:
        """Tell the policy of a new prompt; ``event`` holds what it needs (for SWIFT: embeddings by head and rho)."""
        self._require("idle", "prompt_changed")
        SparseMaps.forget(self.all_banks())
        for bank in self.all_banks():
            self.policy.on_prompt(bank, event)

    def scene_cut(self) -> bool:
        """A hard cut before the next chunk. True if the policy keeps its history across it; else all is forgotten."""
        self._require("idle", "scene_cut")
        SparseMaps.forget(self.all_banks())
        kept = [self.policy.on_cut(bank) for bank in self.all_banks()]
        if not all(kept):
            self.reset()
        return all(kept)

    def report(self) -> MemoryReport:
        """Bytes by region, scratch and peak, counted on the tensors."""
        return measure(self)

    def held(self) -> dict[str, list[int]]:
        """Region -> the latent frames it holds tokens of, of any layer and head group. Host numbers only."""
        found: dict[str, set[int]] = {}
        for bank in self.all_banks():
            for entry in bank.entries:
                found.setdefault(entry.region, set()).update(entry.frames)
        return {region: sorted(frames) for region, frames in found.items()}

    def held_by_group(self) -> list[dict[str, Any]]:
        """One entry a head group: ``heads`` in it over all layers, and ``held`` as in ``held()``. Host numbers only."""
        heads: dict[int, int] = {}
        found: dict[int, dict[str, set[int]]] = {}
        for bank in self.all_banks():
            heads[bank.group] = heads.get(bank.group, 0) + bank.num_heads
            regions = found.setdefault(bank.group, {})
            for entry in bank.entries:
                regions.setdefault(entry.region, set()).update(entry.frames)
        return [
            {
                "heads": heads[group],
                "held": {region: sorted(frames) for region, frames in found[group].items()},
            }
            for group in sorted(found)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """A bit-exact snapshot between chunks: named tensors, among them ``meta`` (JSON as uint8)."""
        from streamvid.memory.snapshot import dump

        self._require("idle", "state_dict")
        return dump(self)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a snapshot made by a cache of the same geometry, policy and codec.

        Raises:
            ValueError: the snapshot belongs to another kind of cache.
        """
        from streamvid.memory.snapshot import restore

        self.abort()
        restore(self, state)

    def _require(self, phase: Phase, what: str) -> None:
        if self.phase != phase:
            raise ValueError(
                f"{what} needs an {phase} cache, but it is in phase {self.phase!r}; commit or abort first"
            )

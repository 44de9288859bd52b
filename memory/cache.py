"""The cache of one stream: answers every self-attention call, and keeps what the policy decides.

Knows tokens, frames and heads; no model, no prompt, no file. Queries, keys and values arrive before rotary embedding.

Life of a chunk::

    cache.begin_chunk(frames)                 # plans what the chunk sees; changes nothing
    for each denoising step, each layer:      # noisy passes: write only the current region, read a frozen view
        cache.attend(layer, q, k, v)
    cache.begin_context()                     # the clean latents, once
    for each layer but the last:
        cache.attend(layer, q, k, v)
    cache.write(last, k, v)                   # nothing needs the last layer's attention
    cache.commit()                            # the only step that changes committed state; abort() drops the chunk
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from streamvid.kernels.attention import attend
from streamvid.kernels.rope import GridRope, rotate
from streamvid.kernels.selectors import Selector
from streamvid.kernels.types import KVView
from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.policies import POLICIES
from streamvid.memory.policy import Chunk, MemoryPolicy, Seen, Stage, overrides
from streamvid.memory.report import MemoryReport
from streamvid.memory.sparse import SparseMaps
from streamvid.memory.spec import build
from streamvid.memory.view import Scratch, View, resolve

Phase = Literal["idle", "noisy", "context", "lost"]


class KVCache:
    """Keys and values of all layers of one stream.

    Args:
        geometry: sizes, dtype and device.
        policy: a memory policy, or its text form (``"window:size=12,sink=3"``).
        codec: a codec that packs what is committed, or None for plain tensors.
        chunk_frames: latent frames of the usual chunk. Policies leave this many free at commit, so that the next chunk
            is written where evicted frames were.
        backend: attention backend, see `streamvid.kernels.attention.choose_backend`.
        sparse: a block selection rule, or its text form (``"topk:density=0.25"``, see `streamvid.kernels.selectors`):
            each block of queries reads only the key blocks chosen in the chunk's first pass. None = every key.
        shadow: keep rotated keys across passes instead of turning one layer's keys at every call. Costs half of the
            cache's bytes again, saves time where attention is not the bottleneck; plain tensors only.
        retain: keep what the next chunk will not see until that chunk commits (costs ``chunk_frames`` more slots), so
            that the window is whole after a commit, as the public loops leave it.
        subsets: allow passes over some tokens of a chunk with a codec too (keeps the current chunk of every layer).
        parity: rotate in float64, as the public reference does, instead of float32.
        position_limit: temporal positions are kept below this by a common shift where the view is narrow enough.
        fill: value of unwritten storage (tests fill NaN); None leaves it uninitialised.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        policy: str | MemoryPolicy = "window",
        codec: Any = None,
        *,
        chunk_frames: int = 3,
        backend: str = "auto",
        sparse: str | Selector | None = None,
        shadow: bool = False,
        retain: bool = False,
        subsets: bool = False,
        parity: bool = False,
        position_limit: int = 1024,
        fill: float | None = None,
    ) -> None:
        if chunk_frames < 1:
            raise ValueError(f"chunk_frames must be at least 1, got {chunk_frames}")
        if shadow and codec is not None:
            raise ValueError(
                "shadow keeps plain rotated keys and cannot be combined with a codec; choose one"
            )
        self.geometry, self.codec, self.chunk_frames = geometry, codec, chunk_frames
        self.policy = build(policy, POLICIES, "memory policy")
        self.policy.validate(geometry, chunk_frames)
        self.backend, self.shadow, self.retain, self.position_limit = backend, shadow, retain, position_limit
        self.subsets = subsets
        self._slots = codec is None
        self._scratch = Scratch(geometry.dtype, geometry.device, fill)
        precision = torch.complex128 if parity else torch.complex64
        self._reads_stored = codec is not None and sparse is None and backend == "triton"
        self._sparse = None if sparse is None else SparseMaps(sparse, geometry.grid)
        self._rope = GridRope(geometry.head_dim, geometry.grid, geometry.device, precision)
        self.banks = self._layout(fill)
        self.phase: Phase = "idle"
        self.chunk: Chunk | None = None
        self.next_frame = 0
        self.num_chunks = 0
        self._calls = [0] * geometry.layers
        self._views: dict[tuple[int, int], View] = {}
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._written: set[int] = set()
        self._peak = 0
        self._watches = overrides(self.policy, "observe") or overrides(self.policy, "refine")

    def _layout(self, fill: float | None) -> list[list[Bank]]:
        geometry, chunk = self.geometry, self.chunk_frames
        groups = self.policy.groups(geometry)
        banks = []
        for layer in range(geometry.layers):
            heads = [None] if groups is None else [list(group) for group in groups[layer] if len(group)]
            if groups is not None and sorted(h for group in heads for h in group) != list(
                range(geometry.heads)
            ):
                raise ValueError(
                    f"head groups of layer {layer} are not a partition of {geometry.heads} heads: {heads}"
                )
            row = []
            for number, members in enumerate(heads):
                capacity = self.policy.capacity(geometry, layer, number, chunk)
                if capacity is not None and self.retain:
                    capacity += chunk
                members = members if members is None else sorted(members)
                row.append(
                    Bank(
                        geometry,
                        layer,
                        number,
                        members,
                        capacity,
                        codec=self.codec,
                        fill=fill,
                        shadow=self.shadow,
                    )
                )
            banks.append(row)
        return banks

    def all_banks(self) -> Iterator[Bank]:
        """Every bank, in order of layers."""
        for row in self.banks:
            yield from row

    # ---- the chunk -----------------------------------------------------------------------------------------------

    def begin_chunk(self, frames: int, *, skip: int = 0) -> Chunk:
        """Plan the next chunk of ``frames`` latent frames, at the next absolute frame.

        Args:
            frames: latent frames of the chunk.
            skip: leading frames whose keys and values are neither seen nor kept; only their queries run (a re-cache
                that leaves the sink as it was).

        Raises:
            ValueError: a chunk is in progress, or the sizes cannot work.
        """
        self._require("idle", "begin_chunk")
        if frames < 1 or not 0 <= skip < frames:
            raise ValueError(
                f"a chunk needs at least 1 latent frame and skip below it, got {frames} and skip={skip}"
            )
        ahead = 0 if self.retain else self.chunk_frames
        chunk = Chunk(self.num_chunks, self.next_frame, frames, ahead, skip)
        views: dict[tuple[int, int], View] = {}
        begun = []
        try:
            for bank in self.all_banks():
                plan = self.policy.plan(bank, chunk)
                begun.append(bank)
                bank.begin(chunk.frames[skip:], slots=self._slots)
                views[bank.layer, bank.group] = resolve(bank, plan, self._rope, self.position_limit, skip)
        except Exception:
            for bank in begun:
                bank.discard()
            raise
        self.chunk, self._views, self.phase = chunk, views, "noisy"
        self._note_peak()
        return chunk

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, tokens: Tensor | None = None) -> Tensor:
        """Self-attention of the current chunk over what its plan shows it.

        Args:
            layer: 0-based.
            q, k, v: ``[b, n, heads, head_dim]`` before rotary embedding, n = the chunk's tokens in raster order.
            tokens: int64 ``[n]``: the tokens given, where not all are recomputed; the others keep the keys and values
                of the pass before. Noisy passes only.

        Returns:
            ``[b, n, heads, head_dim]``.
        """
        chunk, stage = self._in_chunk("attend")
        if tokens is not None:
            self._check_subset(layer, chunk, stage)
        skipped = chunk.skip * self.geometry.tokens_per_frame
        outputs, queries = [], []
        self._scratch.begin()
        for bank in self.banks[layer]:
            q_group, k_group, v_group = (self._heads(x, bank) for x in (q, k, v))
            k_group, v_group = self._current(bank, k_group[:, skipped:], v_group[:, skipped:], stage, tokens)
            view = self._view(bank, q_group, k_group, v_group, stage)
            table = view.query_table if tokens is None else view.query_table[tokens]
            q_group = rotate(q_group, table)
            queries.append((bank, q_group))
            stored = view.stored(bank, k_group, v_group) if self._reads_stored else None
            if stored is not None:
                outputs += [KVView(a, b, bank.heads, bias, turn) for a, b, turn, bias in stored]
                continue
            keys, values = view.fill(bank, k_group, v_group, self._scratch)
            blocks = None
            if self._sparse is not None and tokens is None:
                blocks = self._sparse.map((layer, bank.group), view, q_group, keys)
            outputs.append(KVView(keys, values, heads=bank.heads, bias=view.bias, blocks=blocks))
        self._calls[layer] += 1
        if stage == "context":
            self._written.add(layer)
        if layer == 0 or self._scratch.grew:
            self._note_peak()
        return attend(self._join(queries, q), outputs, backend=self.backend)

    def begin_context(self) -> None:
        """From here on, the passes carry the clean latents that will be committed."""
        self._in_chunk("begin_context")
        self.phase = "context"
        self._written.clear()

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values of a layer whose attention nobody needs (the last one, in the context pass)."""
        chunk, stage = self._in_chunk("write")
        if stage != "context":
            raise ValueError("write belongs to the context pass; call begin_context first")
        skipped = chunk.skip * self.geometry.tokens_per_frame
        for bank in self.banks[layer]:
            self._current(
                bank, self._heads(k, bank)[:, skipped:], self._heads(v, bank)[:, skipped:], stage, None
            )
        self._written.add(layer)

    def commit(self) -> None:
        """Make the chunk part of the history, and let the policy decide what stays. Layer by layer.

        Raises:
            ValueError: no complete context pass has been run.
        """
        chunk, stage = self._in_chunk("commit")
        missing = sorted(set(range(self.geometry.layers)) - self._written)
        if stage != "context" or missing:
            raise ValueError(
                f"commit needs a complete context pass; layers {missing or 'all'} were not written"
            )
        self._note_peak()
        for bank in self.all_banks():
            self._commit_bank(bank, chunk)
        self.next_frame += chunk.count
        self.num_chunks += 1
        self._end()

    def abort(self) -> None:
        """Drop the chunk in progress: the committed state is as it was before `begin_chunk`. Harmless when idle."""
        for bank in self.all_banks():
            bank.discard()
        if self.phase != "lost":
            self._end()

    # ---- between chunks --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything; storage stays allocated, so that a new clip costs no allocation."""
        self.abort()
        for bank in self.all_banks():
            bank.clear()
        self.next_frame = self.num_chunks = 0

    def rebuild(self, start: int, *, keep_sink: bool = False) -> None:
        """Forget the history in order to encode it again, from latent frame ``start`` on (prompt change: re-cache).

        The caller then runs context passes over the clean latents from ``start`` on: all in one chunk (LongLive's
        bidirectional re-cache) or chunk by chunk (causal re-cache). With ``keep_sink`` the sink's entries stay; give
        ``begin_chunk(frames, skip=sink frames)`` so that the first frames run as queries only, as LongLive does when
        the sink is global and the re-cached range does not begin with it.
        """
        self._require("idle", "rebuild")
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
        if not 0 < frames <= self.next_frame:
            raise ValueError(f"rewind needs 1 to {self.next_frame} latent frames, got {frames}")
        first = self.next_frame - frames
        for bank in self.all_banks():
            bank.drop([entry for entry in bank.entries if entry.frames and entry.frames[0] >= first])
        self.next_frame = first

    def flush(self, keep: int = 0, *, sink: bool = True) -> None:
        """Forget all but the sink (if ``sink``) and the newest ``keep`` frames: immediate response to a new prompt."""
        self._require("idle", "flush")
        if keep < 0:
            raise ValueError(f"flush keeps 0 or more latent frames, got {keep}")
        for bank in self.all_banks():
            pinned = [e for e in bank.entries if sink and e.region == "sink"]
            rest = [e for e in bank.entries if e not in pinned and e.frames]
            newest: list[Entry] = []
            while rest and sum(e.num_frames for e in newest) + rest[-1].num_frames <= keep:
                newest.append(rest.pop())
            bank.keep(pinned + newest)

    def prompt_changed(self, event: dict[str, Any]) -> None:
        """Tell the policy of a new prompt; ``event`` holds what it needs (for SWIFT: embeddings by head and rho)."""
        self._require("idle", "prompt_changed")
        for bank in self.all_banks():
            self.policy.on_prompt(bank, event)

    def scene_cut(self) -> bool:
        """A hard cut before the next chunk. True if the policy keeps its history across it; else all is forgotten."""
        self._require("idle", "scene_cut")
        kept = [self.policy.on_cut(bank) for bank in self.all_banks()]
        if not all(kept):
            self.reset()
        return all(kept)

    # ---- accounting and snapshots ------------------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """Bytes by region, scratch and peak, counted on the tensors."""
        regions: dict[str, int] = {}
        free = state = rotated = dense = 0
        for bank in self.all_banks():
            slot = self.geometry.frame_bytes(bank.num_heads)
            for entry in [*bank.entries, *bank.current]:
                size = (
                    entry.codec.nbytes(entry.packed) if entry.packed is not None else slot * len(entry.slots)
                )
                size += sum(x.nbytes for x in (entry.positions, entry.count) if x is not None)
                regions[entry.region] = regions.get(entry.region, 0) + size
                if entry.region != "current":
                    dense += slot * entry.length // self.geometry.tokens_per_frame
            free += slot * len(bank.free)
            rotated += bank.rotated.nbytes
            state += sum(x.nbytes for x in bank.state.values())
            state += sum(x.nbytes for x in bank.notes.values() if isinstance(x, Tensor))
        kept = sum(x.nbytes for pair in self._kept.values() for x in pair)
        if kept:
            regions["current"] = regions.get("current", 0) + kept
        scratch = self._scratch.buffer.nbytes + self._table_bytes()
        frames = max(bank.num_frames for bank in self.all_banks())
        total = sum(regions.values()) + free + state + rotated + scratch
        return MemoryReport(regions, free, state, rotated, scratch, max(self._peak, total), frames, dense)

    def _table_bytes(self) -> int:
        """Rotation tables, biases and block maps, each counted once."""
        tensors = list(self._rope.tensors())
        for view in self._views.values():
            tensors += [view.table, view.query_table, *([] if view.bias is None else [view.bias])]
        if self._sparse is not None:
            tensors += self._sparse.tensors()
        return sum(
            {id(x): x.nbytes for x in tensors}.values()
        )  # by object: shapes without data have no address

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

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _require(self, phase: Phase, what: str) -> None:
        if self.phase != phase:
            raise ValueError(
                f"{what} needs an {phase} cache, but it is in phase {self.phase!r}; commit or abort first"
            )

    def _in_chunk(self, what: str) -> tuple[Chunk, Stage]:
        if self.chunk is None or self.phase not in ("noisy", "context"):
            raise ValueError(f"{what} needs a chunk in progress; call begin_chunk first")
        return self.chunk, self.phase

    def _check_subset(self, layer: int, chunk: Chunk, stage: Stage) -> None:
        if stage == "context" or self._calls[layer] == 0 or chunk.skip:
            raise ValueError(
                "a token subset needs a full noisy pass of the same chunk before it, and no skip"
            )
        if not self._slots and not self.subsets:
            raise ValueError(
                "token subsets with a codec need KVCache(subsets=True), which keeps the current chunk"
            )

    def _heads(self, x: Tensor, bank: Bank) -> Tensor:
        return x if bank.head_index is None else x.index_select(2, bank.head_index)

    def _current(
        self, bank: Bank, k: Tensor, v: Tensor, stage: Stage, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Store the current chunk as far as it must be; return its keys and values in full."""
        if self._slots:
            bank.write_current(k, v, tokens)
            return (k, v) if tokens is None else bank.read_current()
        if tokens is not None:
            k_all, v_all = self._kept[bank.layer, bank.group]
            k_all.index_copy_(1, tokens, k)
            v_all.index_copy_(1, tokens, v)
            return k_all, v_all
        if stage == "context":
            bank.pack_current(k, v)
        elif self.subsets:
            self._kept[bank.layer, bank.group] = k.clone(), v.clone()
        return k, v

    def _view(self, bank: Bank, q: Tensor, k: Tensor, v: Tensor, stage: Stage) -> View:
        """The bank's view, after the policy has looked at this call."""
        key = bank.layer, bank.group
        view = self._views[key]
        if not self._watches:
            return view
        assert self.chunk is not None

        def look() -> Seen:
            current = self._views[key]
            return Seen(
                q,
                k,
                v,
                self.chunk,
                stage,
                self._calls[bank.layer],
                lambda: rotate(q, current.query_table),
                lambda: current.fill(bank, k, v, self._scratch),
            )

        if stage == "noisy" and self._calls[bank.layer] == 0:
            plan = self.policy.refine(bank, view.plan, look())
            if plan is not None:
                view = resolve(bank, plan, self._rope, self.position_limit, self.chunk.skip)
                self._views[key] = view
        self.policy.observe(bank, look())
        return view

    def _join(self, queries: list[tuple[Bank, Tensor]], q: Tensor) -> Tensor:
        if len(queries) == 1:
            return queries[0][1]
        joined = torch.empty_like(q)
        for bank, part in queries:
            joined.index_copy_(2, bank.head_index, part)
        return joined

    def _commit_bank(self, bank: Bank, chunk: Chunk) -> None:
        bank.base = self._views[bank.layer, bank.group].base
        bank.promote()
        self.policy.commit(bank, chunk)
        bank.notes.clear()
        if self.codec is not None:
            bank.recode()

    def _end(self) -> None:
        self.phase, self.chunk = "idle", None
        self._views.clear()
        if self._sparse is not None:
            self._sparse.clear()
        self._kept.clear()
        self._written.clear()
        self._calls = [0] * self.geometry.layers
        self._note_peak()

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self.report().total)

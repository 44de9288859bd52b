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

from collections.abc import Callable

import torch
from torch import Tensor

from streamvid.kernels.attention import attend
from streamvid.kernels.rope import GridRope, rotate
from streamvid.kernels.selectors import Selector
from streamvid.kernels.types import KVView
from streamvid.memory.bank import Bank
from streamvid.memory.codecs import KVCodec, make_codec
from streamvid.memory.codecs.base import Places
from streamvid.memory.codecs.none import NoCodec
from streamvid.memory.compat import check
from streamvid.memory.fused import FusedPass
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.history import History
from streamvid.memory.packing import recode
from streamvid.memory.policies import POLICIES
from streamvid.memory.policy import Chunk, MemoryPolicy, Seen, Stage, overrides
from streamvid.memory.sparse import SparseMaps
from streamvid.memory.spec import build
from streamvid.memory.view import Scratch, View, resolve


class KVCache(History):
    """Keys and values of all layers of one stream.

    Args:
        geometry: sizes, dtype and device.
        policy: a memory policy, or its text form (``"window:size=12,sink=3"``).
        codec: a codec that packs what is committed, or its text form (``"int4"``); None or "none" for plain tensors.
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
        codec: str | KVCodec | None = None,
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
        codec = None if codec is None else make_codec(codec)
        self.codec = None if isinstance(codec, NoCodec) else codec
        if shadow and self.codec is not None:
            raise ValueError(
                "shadow keeps plain rotated keys and cannot be combined with a codec; choose one"
            )
        self.geometry, self.chunk_frames = geometry, chunk_frames
        self.policy = build(policy, POLICIES, "memory policy")
        self.policy.validate(geometry, chunk_frames)
        check(self.policy, self.codec, chunk_frames)
        if sparse is not None and self.policy.per_frame:
            raise ValueError(
                "this memory policy chooses for each latent frame of a chunk what it reads; it cannot be combined "
                "with a block-sparse rule (sparse); choose one"
            )
        self.backend, self.shadow, self.retain, self.position_limit = backend, shadow, retain, position_limit
        self.subsets = subsets
        self._slots = self.codec is None
        self._places = self.codec if isinstance(self.codec, Places) else None
        self.scratch = Scratch(geometry.dtype, geometry.device, fill)
        precision = torch.complex128 if parity else torch.complex64
        self.sparse = None if sparse is None else SparseMaps(sparse, geometry.grid)
        self._reads_stored = self.codec is not None and sparse is None and backend == "triton"
        self.rope = GridRope(geometry.head_dim, geometry.grid, geometry.device, precision)
        self.banks = self._layout(fill)
        self.phase, self.chunk = "idle", None
        self.next_frame = self.num_chunks = self.newest = 0
        self._calls = [0] * geometry.layers
        self.views, self.kept, self.peak = {}, {}, 0
        self._held = 0  # bytes but for the layer scratch, when last counted
        self._written: set[int] = set()
        self.watch: Callable[[Stage, Bank, View, Tensor, Tensor], None] | None = None
        """Sees the rotated queries and keys of every attention call; see `mass.RegionMass`."""
        self._watches = overrides(self.policy, "observe") or overrides(self.policy, "refine")

    def _layout(self, fill: float | None) -> list[list[Bank]]:
        groups = self.policy.groups(self.geometry)
        every = list(range(self.geometry.heads))
        banks = []
        for layer in range(self.geometry.layers):
            parts = [None] if groups is None else [sorted(group) for group in groups[layer]]
            if groups is not None and sorted(head for part in parts for head in part or ()) != every:
                raise ValueError(f"head groups of layer {layer} do not partition {len(every)} heads: {parts}")
            banks.append([self._bank(layer, i, part, fill) for i, part in enumerate(parts) if part != []])
        return banks

    def _bank(self, layer: int, group: int, heads: list[int] | None, fill: float | None) -> Bank:
        capacity = self.policy.capacity(self.geometry, layer, group, self.chunk_frames)
        if capacity is not None and self.retain:
            capacity += self.chunk_frames
        return Bank(
            self.geometry, layer, group, heads, capacity, codec=self.codec, fill=fill, shadow=self.shadow
        )

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
                views[bank.layer, bank.group] = resolve(bank, plan, self.rope, self.position_limit, skip)
        except Exception:
            for bank in begun:
                bank.discard()
            raise
        self.chunk, self.views, self.phase = chunk, views, "noisy"
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
        self.scratch.begin()
        for bank in self.banks[layer]:
            q_group, k_group, v_group = (self.heads(x, bank) for x in (q, k, v))
            k_group, v_group = self._current(bank, k_group[:, skipped:], v_group[:, skipped:], stage, tokens)
            key = bank.layer, bank.group
            # Statistics are of whole passes: a policy is not shown the queries of a token subset.
            view = self._view(bank, q_group, k_group, v_group, stage) if tokens is None else self.views[key]
            table = view.query_table if tokens is None else view.query_table[tokens]
            q_group = rotate(q_group, table)
            queries.append((bank, q_group))
            stored = view.stored(k_group, v_group) if self._reads_stored and self.watch is None else None
            if stored is not None:
                outputs += [KVView(a, b, bank.heads, bias, turn) for a, b, turn, bias in stored]
                continue
            keys, values = view.fill(bank, k_group, v_group, self.scratch)
            if self.watch is not None:
                self.watch(stage, bank, view, q_group, keys)
            blocks = view.blocks
            if self.sparse is not None and tokens is None:
                blocks = self.sparse.map(bank, chunk, view, q_group, keys)
            outputs.append(KVView(keys, values, heads=bank.heads, bias=view.bias, blocks=blocks))
        self._prefetch(layer + 1)
        self._calls[layer] += 1
        if stage == "context":
            self._written.add(layer)
        if self.scratch.grew:
            self.peak = max(self.peak, self._held + self.scratch.buffer.nbytes)
        return attend(self.join(queries, q), outputs, backend=self.backend)

    def begin_context(self) -> None:
        """From here on, the passes carry the clean latents that will be committed."""
        self._in_chunk("begin_context")
        self.phase = "context"
        self._written.clear()

    @property
    def observes(self) -> bool:
        """Whether the policy looks at queries, so that the context pass must compute those of the last layer too."""
        return overrides(self.policy, "observe")

    def write(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Keys and values of a layer whose attention nobody needs (the last one, in the context pass).

        Args:
            layer: 0-based.
            k, v: ``[b, n, heads, head_dim]`` before rotary embedding.
            q: the queries, for a policy that ``observes`` them.
        """
        chunk, stage = self._in_chunk("write")
        if stage != "context":
            raise ValueError("write belongs to the context pass; call begin_context first")
        if q is None and self.observes:
            raise ValueError("this memory policy observes queries; give write the q of this layer too")
        skipped = chunk.skip * self.geometry.tokens_per_frame
        self.scratch.begin()
        for bank in self.banks[layer]:
            k_group, v_group = (self.heads(x, bank)[:, skipped:] for x in (k, v))
            k_group, v_group = self._current(bank, k_group, v_group, stage, None)
            if q is not None:
                self._view(bank, self.heads(q, bank), k_group, v_group, stage)
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
        if self.sparse is not None:
            self.sparse.keep(self.all_banks())
        for bank in self.all_banks():
            self._commit_bank(bank, chunk)
        self.next_frame += chunk.count
        if self.next_frame > self.newest:
            self.newest = self.next_frame
            self.num_chunks += 1
        self._end()
        self._prefetch(0)  # while the caller decodes pictures

    def begin_fused(self, frames: int) -> FusedPass | None:
        """Start the context pass of this chunk fused with the first step of the next one, of ``frames`` latent frames.

        Returns None where that would not be exact (the policy edits or watches, a codec packs, maps are sparse): run
        `begin_context`, the pass, `commit` and `begin_chunk` instead. Afterwards call `finish_fused`.
        """
        self._in_chunk("begin_fused")
        if frames < 1:
            raise ValueError(f"a chunk needs at least 1 latent frame, got {frames}")
        exact = self.policy.fusable and not self._watches and self.codec is None and self.sparse is None
        if not exact or self.chunk.skip:
            return None
        self.begin_context()
        return FusedPass(self, frames)

    def finish_fused(self, fused: FusedPass) -> Chunk:
        """Commit the chunk and begin the next one, whose first noisy pass has just been run."""
        self.commit()
        return self.begin_chunk(fused.next.count)

    def abort(self) -> None:
        """Drop the chunk in progress: the committed state is as it was before `begin_chunk`. Harmless when idle."""
        for bank in self.all_banks():
            bank.discard()
        self._end()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _in_chunk(self, what: str) -> tuple[Chunk, Stage]:
        if self.chunk is None or self.phase not in ("noisy", "context"):
            raise ValueError(f"{what} needs a chunk in progress; call begin_chunk first")
        return self.chunk, self.phase

    def _check_subset(self, layer: int, chunk: Chunk, stage: Stage) -> None:
        if stage == "context" or self._calls[layer] == 0 or chunk.skip:
            raise ValueError(
                "a token subset needs a full noisy pass of the same chunk before it, and no skip"
            )
        if self.policy.per_frame:
            raise ValueError(
                "this memory policy chooses for each latent frame what it reads; passes over some tokens of a "
                "chunk are not possible with it"
            )
        if not self._slots and not self.subsets:
            raise ValueError(
                "token subsets with a codec need KVCache(subsets=True), which keeps the current chunk"
            )

    def heads(self, x: Tensor, bank: Bank) -> Tensor:
        """The heads of ``x [b, n, heads, d]`` that a bank holds."""
        return x if bank.head_index is None else x.index_select(2, bank.head_index)

    def _current(
        self, bank: Bank, k: Tensor, v: Tensor, stage: Stage, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Store the current chunk as far as it must be; return its keys and values in full."""
        if self._slots:
            bank.write_current(k, v, tokens)
            return (k, v) if tokens is None else bank.read_current()
        if tokens is not None:
            k_all, v_all = self.kept[bank.layer, bank.group]
            k_all.index_copy_(1, tokens, k)
            v_all.index_copy_(1, tokens, v)
            return k_all, v_all
        if stage == "context":
            bank.pack_current(k, v)
        elif self.subsets:
            self.kept[bank.layer, bank.group] = k.clone(), v.clone()
        return k, v

    def _view(self, bank: Bank, q: Tensor, k: Tensor, v: Tensor, stage: Stage) -> View:
        """The bank's view, after the policy has looked at this call."""
        key = bank.layer, bank.group
        view = self.views[key]
        if not self._watches:
            return view
        assert self.chunk is not None

        def look() -> Seen:
            current = self.views[key]
            return Seen(
                q,
                k,
                v,
                self.chunk,
                stage,
                self._calls[bank.layer],
                lambda: rotate(q, current.query_table),
                lambda: current.fill(bank, k, v, self.scratch),
            )

        if stage == "noisy" and self._calls[bank.layer] == 0:
            plan = self.policy.refine(bank, view.plan, look())
            if plan is not None:
                view = resolve(bank, plan, self.rope, self.position_limit, self.chunk.skip)
                self.views[key] = view
        self.policy.observe(bank, look())
        return view

    def join(self, queries: list[tuple[Bank, Tensor]], q: Tensor) -> Tensor:
        """Rotated queries of all groups in the order of the model's heads."""
        if len(queries) == 1:
            return queries[0][1]
        joined = torch.empty_like(q)
        for bank, part in queries:
            joined.index_copy_(2, bank.head_index, part)
        return joined

    def _commit_bank(self, bank: Bank, chunk: Chunk) -> None:
        bank.base = self.views[bank.layer, bank.group].base
        bank.promote()
        self.policy.commit(bank, chunk)
        bank.notes.clear()
        if self.codec is not None:
            recode(bank)

    def _prefetch(self, layer: int) -> None:
        """Tell a codec with an archive which blocks will be read next."""
        if self._places is not None:
            row = self.banks[layer % len(self.banks)]
            entries = [entry for bank in row for entry in bank.entries if entry.codec is self.codec]
            self._places.prefetch([entry.packed for entry in entries])

    def _end(self) -> None:
        self.phase, self.chunk = "idle", None
        self.views.clear()
        if self.sparse is not None:
            self.sparse.clear()
        self.kept.clear()
        self._written.clear()
        self._calls = [0] * self.geometry.layers

    def _note_peak(self) -> None:
        """Count all bytes: where chunks begin and before they commit; scratch alone grows in between."""
        report = self.report()
        self.peak, self._held = report.peak, report.total - self.scratch.buffer.nbytes

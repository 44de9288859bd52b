"""Storage of one layer and one group of heads: un-rotated keys and values in frame-sized slots, and what each run is.

Slots are physical: a dropped frame's slots are handed to the next newcomer, nothing is shifted or cloned. Entries are
logical: the read order that policies and reports see. Knows no model, no attention, no position function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamvid.memory.codecs.none import NoCodec
from streamvid.memory.geometry import KVGeometry


@dataclass(eq=False)
class Entry:
    """A run of tokens: normally one latent frame in raster order."""

    region: str
    """sink, memory, side, recent or current; a policy may use further names."""
    frames: tuple[int, ...]
    """Source latent frames; empty for synthetic tokens."""
    t: tuple[float, ...]
    """Absolute temporal position of each frame; a single number (the origin) if ``positions`` is given."""
    length: int
    """Tokens."""
    slots: tuple[int, ...] = ()
    """Storage slots, in token order; empty if packed."""
    packed: Any = None
    """A codec's packed form; None if in slots."""
    codec: Any = None
    """The codec that packed it; None if in slots."""
    positions: Tensor | None = None
    """fp32 ``[b | 1, length, group heads | 1, 3]`` (frame relative to the origin ``t[0]``, row, column) of tokens that
    are not whole frames; None: raster order on the grid."""
    count: Tensor | None = None
    """fp32 ``[b | 1, length, group heads | 1]``: how many tokens each one stands for (adds its log to the logit)."""
    rope: bool = True
    """False: keys are used without rotation (bridge and anchor tokens)."""
    tags: dict[str, Any] = field(default_factory=dict)
    """Notes of the policy; JSON values only, kept in snapshots."""

    @property
    def num_frames(self) -> int:
        """Latent frames it counts for in a window: those it came from."""
        return len(self.frames)


class Bank:
    """Keys and values of one head group of one layer.

    Attributes that policies use: ``layer``, ``group``, ``heads`` (indices, or None for all), ``entries`` (committed, in
    read order), ``current`` (the chunk in progress), ``state`` (named tensors that survive), ``notes`` (dies with the
    chunk), ``tokens_per_frame``. With a codec every committed entry is packed and there are no slots.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layer: int,
        group: int,
        heads: Sequence[int] | None,
        capacity: int | None,
        *,
        codec: Any = None,
        fill: float | None = None,
        shadow: bool = False,
    ) -> None:
        self.geometry, self.layer, self.group, self.codec = geometry, layer, group, codec
        self.heads = None if heads is None else tuple(heads)
        self.head_index = None if heads is None else torch.tensor(self.heads, device=geometry.device)
        self.num_heads = geometry.heads if heads is None else len(heads)
        self.tokens_per_frame = geometry.tokens_per_frame
        self.slot_bytes = geometry.frame_bytes(self.num_heads)
        """Bytes of keys and values of one slot."""
        self.entries: list[Entry] = []
        self.current: list[Entry] = []
        self._current_runs: list[tuple[int, int]] = []
        self.state: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}
        self.base = 0
        self.capacity = capacity
        self.free: list[int] = []
        self._fill, self.shadow = fill, shadow
        self.k = self._empty(0)
        self.v = self._empty(0)
        self.rotated = self._empty(0)
        self.rotated_t: list[float | None] = []

    # ---- reading -----------------------------------------------------------------------------------------------

    @property
    def num_frames(self) -> int:
        """Latent frames committed."""
        return sum(entry.num_frames for entry in self.entries)

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return self.k.shape[1] // self.tokens_per_frame

    def newest(self, frames: int, *, keep: str = "sink") -> list[Entry]:
        """All entries of the region ``keep`` and the newest others that fit into ``frames`` together with them."""
        room = frames - sum(entry.num_frames for entry in self.entries if entry.region == keep)
        chosen = []
        for entry in reversed(self.entries):
            if entry.region == keep:
                chosen.append(entry)
            elif room >= entry.num_frames:
                room -= entry.num_frames
                chosen.append(entry)
            else:
                room = 0
        return chosen[::-1]

    def read(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Un-rotated keys and values ``[b, length, group heads, d]``: a view where possible, decoded where packed."""
        if entry.packed is not None:
            return entry.codec.decode(entry.packed, None)
        runs = self.runs(entry)
        if len(runs) == 1:
            return self.k[:, runs[0][0] : runs[0][1]], self.v[:, runs[0][0] : runs[0][1]]
        return (
            torch.cat([self.k[:, a:b] for a, b in runs], dim=1),
            torch.cat([self.v[:, a:b] for a, b in runs], dim=1),
        )

    def runs(self, entry: Entry) -> list[tuple[int, int]]:
        """Row ranges ``(start, stop)`` of an entry in ``k`` and ``v``, in token order, joined where they touch."""
        runs: list[tuple[int, int]] = []
        left, size = entry.length, self.tokens_per_frame
        for slot in entry.slots:
            start, stop = slot * size, slot * size + min(size, left)
            left -= stop - start
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs

    # ---- changing (commit only) --------------------------------------------------------------------------------

    def drop(self, entries: Iterable[Entry]) -> None:
        """Forget entries and free their slots."""
        gone = {id(entry) for entry in entries}
        for entry in self.entries:
            if id(entry) in gone:
                self._release(entry)
        self.entries = [entry for entry in self.entries if id(entry) not in gone]

    def keep(self, entries: Iterable[Entry]) -> None:
        """Drop every committed entry that is not listed."""
        kept = {id(entry) for entry in entries}
        self.drop([entry for entry in self.entries if id(entry) not in kept])

    def mark_sink(self, frames: int) -> None:
        """Give the region "sink" to the first ``frames`` frames held."""
        for entry in self.entries:
            if frames < entry.num_frames or not entry.num_frames:
                break
            frames -= entry.num_frames
            entry.region = "sink"

    def overwrite(self, entry: Entry, k: Tensor, v: Tensor) -> None:
        """Replace the contents of an entry: ``[b, length, group heads, d]`` un-rotated."""
        if entry.packed is not None:
            entry.packed = entry.codec.encode(k, v, region=entry.region, age=self.age(entry))
            return
        at = 0
        for start, stop in self.runs(entry):
            self.k[:, start:stop] = k[:, at : at + stop - start]
            self.v[:, start:stop] = v[:, at : at + stop - start]
            at += stop - start
        for slot in entry.slots:
            self._forget_rotation(slot)

    def add(
        self,
        k: Tensor,
        v: Tensor,
        *,
        region: str,
        t: tuple[float, ...],
        frames: tuple[int, ...] = (),
        positions: Tensor | None = None,
        count: Tensor | None = None,
        rope: bool = True,
        at: int | None = None,
    ) -> Entry:
        """Store new tokens ``[b, n, group heads, d]`` (un-rotated) as an entry at index ``at`` of the read order (end).

        ``frames`` are the source frames that count towards a window; leave it empty for synthetic tokens. Without
        ``positions`` the tokens must be whole frames in raster order, one for each number in ``t``.
        """
        if positions is None and rope and k.shape[1] != len(t) * self.tokens_per_frame:
            raise ValueError(
                f"{k.shape[1]} tokens are not {len(t)} frames of {self.tokens_per_frame}; give their positions"
            )
        entry = Entry(region, frames, t, k.shape[1], positions=positions, count=count, rope=rope)
        if self.codec is not None:
            entry.codec, entry.packed = self.codec, self.codec.encode(k, v, region=region, age=0)
        else:
            entry.slots = self.allocate(math.ceil(k.shape[1] / self.tokens_per_frame))
            self.overwrite(entry, k, v)
        self.entries.insert(len(self.entries) if at is None else at, entry)
        return entry

    def age(self, entry: Entry) -> int:
        """Latent frames committed after the newest of an entry; 0 for synthetic tokens."""
        newest = max((frame for other in self.entries for frame in other.frames), default=0)
        return newest - max(entry.frames) if entry.frames else 0

    # ---- the chunk in progress (used by the cache) ---------------------------------------------------------------

    def begin(self, frames: Sequence[int], *, slots: bool) -> None:
        """Prepare the current region for these absolute frames, in slots or to be packed by `pack_current`."""
        taken = self.allocate(len(frames)) if slots else ()
        self.current = [
            Entry("current", (frame,), (frame,), self.tokens_per_frame, slots=taken[i : i + 1])
            for i, frame in enumerate(frames)
        ]
        self._current_runs = self.runs(Entry("", (), (), len(taken) * self.tokens_per_frame, slots=taken))

    def pack_current(self, k: Tensor, v: Tensor) -> None:
        """Pack the chunk's un-rotated keys and values (context pass, with a codec)."""
        codec = self.codec if self.codec.span_frames == 1 else NoCodec()
        size = self.tokens_per_frame
        for i, entry in enumerate(self.current):
            rows = slice(i * size, (i + 1) * size)
            age = len(self.current) - 1 - i
            entry.codec, entry.packed = codec, codec.encode(k[:, rows], v[:, rows], region="recent", age=age)

    def write_current(self, k: Tensor, v: Tensor, tokens: Tensor | None = None) -> None:
        """Write the chunk's un-rotated keys and values to its slots; ``tokens``: indices within the chunk."""
        if tokens is not None:
            rows = self.current_rows()[tokens]
            self.k.index_copy_(1, rows, k)
            self.v.index_copy_(1, rows, v)
        else:
            at = 0
            for start, stop in self.current_runs():
                self.k[:, start:stop] = k[:, at : at + stop - start]
                self.v[:, start:stop] = v[:, at : at + stop - start]
                at += stop - start
        if self.shadow:
            for entry in self.current:
                self._forget_rotation(entry.slots[0])

    def read_current(self) -> tuple[Tensor, Tensor]:
        """The chunk's un-rotated keys and values as last written to its slots, raster order."""
        runs = self.current_runs()
        return tuple(  # type: ignore[return-value]
            x[:, runs[0][0] : runs[0][1]]
            if len(runs) == 1
            else torch.cat([x[:, a:b] for a, b in runs], dim=1)
            for x in (self.k, self.v)
        )

    def current_runs(self) -> list[tuple[int, int]]:
        """Row ranges of the current region."""
        return self._current_runs

    def current_rows(self) -> Tensor:
        """Row of every current token, int64."""
        return torch.cat([torch.arange(a, b, device=self.k.device) for a, b in self.current_runs()])

    def promote(self) -> None:
        """Append the current chunk to the committed entries, as region "recent"."""
        for entry in self.current:
            entry.region = "recent"
        self.entries += self.current
        self.current = []

    def discard(self) -> None:
        """Forget the current chunk."""
        for entry in self.current:
            self._release(entry)
        self.current = []
        self.notes.clear()

    def clear(self) -> None:
        """Forget everything committed; slots stay allocated."""
        self.drop(list(self.entries))
        self.state.clear()
        self.base = 0

    # ---- slots ---------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take free slots, lowest first; grow the storage when there are too few."""
        if count > len(self.free):
            used = self.slots - len(self.free)
            if self.capacity is None:
                target = max(used + count, self.slots + max(self.slots // 4, 1) if self.slots else 0)
            else:
                target = max(self.capacity, used + count)
            self.resize(target)
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def resize(self, slots: int) -> None:
        """Grow to this many slots, keeping contents."""
        old, rows = self.slots, self.slots * self.tokens_per_frame
        for name in ("k", "v", *(["rotated"] if self.shadow else [])):
            grown = self._empty(slots)
            grown[:, :rows] = getattr(self, name)
            setattr(self, name, grown)
        self.free += range(old, slots)
        self.rotated_t += [None] * (slots - old)

    def _release(self, entry: Entry) -> None:
        self._free(entry.slots)
        entry.slots, entry.packed = (), None

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._forget_rotation(slot)
        self.free = sorted([*self.free, *slots])

    def _forget_rotation(self, slot: int) -> None:
        self.rotated_t[slot] = None

    def _empty(self, slots: int) -> Tensor:
        g = self.geometry
        shape = (g.batch, slots * self.tokens_per_frame, self.num_heads, g.head_dim)
        if self._fill is not None:
            return torch.full(shape, self._fill, dtype=g.dtype, device=g.device)
        return torch.empty(shape, dtype=g.dtype, device=g.device)

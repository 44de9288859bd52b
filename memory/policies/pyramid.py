"""Pyramid Forcing: wave heads read one phase of the past, anchor heads strided frames, veil heads merged blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.memory.bank import Bank, Entry
from streamvid.memory.geometry import KVGeometry
from streamvid.memory.heads import HeadProfile, groups_by_label
from streamvid.memory.policy import Chunk, MemoryPolicy, Plan
from streamvid.memory.rope import absolute
from streamvid.memory.tokens import Tokens, raster, store

WAVE, ANCHOR, VEIL = "wave", "anchor", "veil"
KINDS = (WAVE, ANCHOR, VEIL)


@dataclass(kw_only=True)
class Pyramid(MemoryPolicy):
    """Three groups of heads a layer, each with a memory of its own shape beside sink and newest frames.

    Pyramid Forcing (training-free; the head profile is of one checkpoint). ``recent`` counts the newest frames with the
    chunk itself. *Wave* heads keep ``wave_sink`` frames and the newest ``period * bucket``, but each frame of the
    chunk reads only those of its own phase, t mod ``period``. *Anchor* heads keep ``sink`` frames and the newest
    ``bucket`` with t mod ``period`` = 0. *Veil* heads keep ``sink`` frames and the newest ``bucket`` blocks of merge
    frames by 2 x 2 tokens, averaged (un-rotated; a token counts as one). Sink and remembered frames are all read at one
    temporal position, ``near`` to ``far`` frames before the chunk; merged tokens at the lower middle of their block;
    newest frames at their own. A remembered frame that is also sink or newest is not read twice.

    Without a profile every head is an anchor. Deviations: a frame is stored once, where the published pools hold newest
    frames twice and 31 places for every head; a grid with an odd side is not pooled along it; with ``bypass`` all is
    read at absolute positions until the history is longer than sink, memory and newest frames of an anchor head, so
    that a short stream equals the full cache (published: one position for the sink from the first chunk on).
    """

    fusable = False
    per_frame = True

    profile: str | None = None
    """Head profile file with the labels of pyramid; None: all heads anchors."""
    sink: int = 3
    """Sink frames of anchor and veil heads."""
    wave_sink: int = 1
    recent: int = 4
    """Newest frames that are read, the chunk included."""
    period: int = 6
    """Frames of a wave head's cycle, and between an anchor head's remembered frames."""
    bucket: int = 4
    """Remembered frames of a phase (wave) or in all (anchor), remembered blocks (veil)."""
    merge: int = 4
    """Frames of a veil head's block."""
    near: int = 18
    far: int = 21
    bypass: bool = True

    def __post_init__(self) -> None:
        self._labels = HeadProfile.load(self.profile) if self.profile else None

    @classmethod
    def of(cls, profile: HeadProfile, **settings) -> Pyramid:
        """The policy with a profile at hand instead of in a file."""
        policy = cls(**settings)
        policy._labels = profile
        return policy

    def validate(self, geometry: KVGeometry, chunk_frames: int) -> None:
        for name, least in (
            ("sink", 0),
            ("wave_sink", 0),
            ("period", 1),
            ("bucket", 1),
            ("merge", 1),
            ("recent", chunk_frames),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"pyramid: {name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.near <= self.far:
            raise ValueError(f"pyramid: needs 0 <= near <= far, got near={self.near} and far={self.far}")
        if self._labels:
            self._labels.check(geometry)
            self._labels.of("pyramid")

    def groups(self, geometry: KVGeometry) -> Sequence[Sequence[Sequence[int]]] | None:
        if not self._labels:
            return None
        return [groups_by_label(row, KINDS) for row in self._labels.of("pyramid")]

    def _kind(self, bank: Bank) -> str:
        return (
            self._labels.of("pyramid")[bank.layer][bank.heads[0]] if self._labels and bank.heads else ANCHOR
        )

    def _budget(self) -> int:
        """Frames up to which a bypass shows everything, the chunk included."""
        return self.sink + self.bucket + self.recent

    def capacity(self, geometry: KVGeometry, layer: int, group: int, chunk_frames: int) -> int | None:
        labels = self._labels.of("pyramid")[layer] if self._labels else []
        kind = ANCHOR if not labels else KINDS[group]
        previous = max(self.recent - chunk_frames, 0)
        if kind == WAVE:
            held = self.wave_sink + max(self.period * self.bucket, previous)
        else:  # a remembered frame or block takes a slot of its own
            held = self.sink + previous + self.bucket
        return max(held, self._budget() if self.bypass else 0) + chunk_frames

    def reach(self) -> int | None:
        return self.period * self.bucket

    # ---- reading -------------------------------------------------------------------------------------------------

    def plan(self, bank: Bank, chunk: Chunk) -> Plan:
        frames = [entry for entry in bank.entries if entry.num_frames]
        if self._all_shown(frames, chunk.count):
            times, query = absolute(frames, chunk)
            return Plan(frames, times, query)
        first_recent = chunk.start - max(self.recent - chunk.count, 0)
        recent = [entry for entry in frames if entry.frames[0] >= first_recent]
        sink = [entry for entry in frames if entry.region == "sink" and entry.frames[0] < first_recent]
        past = [entry for entry in frames if entry.region != "sink" and entry.frames[0] < first_recent]
        kind = self._kind(bank)
        if kind == ANCHOR:
            past = [entry for entry in past if entry.frames[0] % self.period == 0]
        blocks = []
        if kind == VEIL:
            past = []
            after_sink = max((entry.frames[0] + 1 for entry in frames if entry.region == "sink"), default=0)
            blocks = [e for e in bank.entries if not e.frames and after_sink <= e.t[0] < first_recent]
        far = (float(max(0, chunk.start - min(max(chunk.start, self.near), self.far))),)
        visible = [*sink, *past, *blocks, *recent]
        times = [far] * (len(sink) + len(past)) + [entry.t for entry in (*blocks, *recent)]
        sees = None
        if kind == WAVE and past:
            always = [*range(len(sink)), *range(len(sink) + len(past), len(visible))]
            sees = [
                tuple(
                    sorted(
                        always
                        + [
                            len(sink) + i
                            for i, entry in enumerate(past)
                            if entry.frames[0] % self.period == frame % self.period
                        ]
                    )
                )
                for frame in chunk.frames
            ]
        return Plan(visible, times, chunk.frames, sees=sees)

    def _all_shown(self, frames: list[Entry], count: int) -> bool:
        if not self.bypass or len(frames) + count > self._budget():
            return False
        return not frames or frames[-1].frames[0] - frames[0].frames[0] + 1 == len(frames)

    # ---- after the chunk -----------------------------------------------------------------------------------------

    def commit(self, bank: Bank, chunk: Chunk) -> None:
        kind = self._kind(bank)
        if kind == VEIL:
            for entry in [e for e in bank.entries if e.frames and e.frames[0] >= chunk.start + chunk.skip]:
                self._gather(bank, entry)
        bank.mark_sink(self.wave_sink if kind == WAVE else self.sink)
        frames = [entry for entry in bank.entries if entry.num_frames]
        if self._all_shown(frames, chunk.next_count or chunk.count):
            return
        newest = chunk.frames[-1]
        others = [entry for entry in frames if entry.region != "sink"]
        keep = {id(e) for e in others if e.frames[0] > newest - max(self.recent - chunk.next_count, 0)}
        if kind == WAVE:
            keep |= {id(e) for e in others if e.frames[0] > newest - self.period * self.bucket}
        if kind == ANCHOR:
            keep |= {id(e) for e in [e for e in others if e.frames[0] % self.period == 0][-self.bucket :]}
        bank.drop([entry for entry in others if id(entry) not in keep])

    def _gather(self, bank: Bank, entry: Entry) -> None:
        """Add a frame to the running sum of its block; a complete block becomes an entry."""
        block, place = divmod(entry.frames[0], self.merge)
        # The names say which block is summed up, and how far: nothing has to be asked of the device.
        before, now = f"{block}.{place}.", f"{block}.{place + 1}."
        if place and f"{before}k" not in bank.state:
            return  # the block began before what is known: a cut, or a re-cache of the newest frames
        sums = [self._pool(bank, part) for part in bank.read(entry)]
        if place:
            sums = [bank.state[f"{before}{name}"] + part for name, part in zip("kv", sums, strict=True)]
        bank.state = {key: value for key, value in bank.state.items() if not key.endswith((".k", ".v"))}
        if place + 1 < self.merge:
            bank.state |= {f"{now}{name}": part for name, part in zip("kv", sums, strict=True)}
            return
        k, v = (part / self.merge for part in sums)
        middle = float(block * self.merge + (self.merge - 1) // 2)
        rows, columns = self._strides(bank)
        grid = raster((middle,), bank.geometry.grid, k.device).view(*bank.geometry.grid, 3)
        places = grid[::rows, ::columns].reshape(1, -1, 1, 3).expand(*k.shape[:3], 3)
        ones = torch.ones(k.shape[:3], device=k.device)
        tokens = Tokens(k.to(bank.geometry.dtype), v.to(bank.geometry.dtype), places, ones)
        held = [e for e in bank.entries if not e.frames]
        bank.drop(held[: max(0, len(held) + 1 - self.bucket)])
        store(bank, tokens, None, region="memory", origin=middle, at=0)
        blocks = sorted((e for e in bank.entries if not e.frames), key=lambda e: e.t)
        bank.entries = [*blocks, *(e for e in bank.entries if e.frames)]

    def _strides(self, bank: Bank) -> tuple[int, int]:
        rows, columns = bank.geometry.grid
        return 2 - rows % 2, 2 - columns % 2

    def _pool(self, bank: Bank, x: Tensor) -> Tensor:
        """fp32 means of 2 x 2 tokens of one frame: ``[b, n, heads, d]`` to ``[b, n / 4, heads, d]``."""
        (rows, columns), (dy, dx) = bank.geometry.grid, self._strides(bank)
        tiles = x.float().unflatten(1, (rows // dy, dy, columns // dx, dx))
        return tiles.mean(dim=(2, 4)).flatten(1, 2)

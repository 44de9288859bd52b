"""Temporal positions: where in time the queries of a chunk and the frames it sees are placed.

A position function takes the visible entries (committed, in read order) and the chunk, and returns one number a frame.
Only differences matter to rotary attention, so the cache may shift a whole view (`rebase`): that is what keeps absolute
positions inside the range a model was trained on, and inside what floats hold exactly, however long a stream runs.

Knows entries and chunks; the rotation itself is in ``streamvid.kernels.rope``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from streamvid.memory.bank import Entry
    from streamvid.memory.policy import Chunk

Times = tuple[float, ...]
Placed = tuple[list[Times], Times]
"""Temporal positions of every frame of every visible entry, and of every frame of the chunk."""

PositionName = Literal["abs", "slot", "sink_shift", "unified"]


def absolute(entries: Sequence[Entry], chunk: Chunk) -> Placed:
    """ABS: every frame at its own index since the start of the stream (Self-Forcing, LongLive)."""
    return [entry.t for entry in entries], chunk.frames


def slot(entries: Sequence[Entry], chunk: Chunk) -> Placed:
    """SLOT: 0, 1, 2, ... over the view in read order, the chunk last (StreamingLLM, Infinity-RoPE)."""
    placed: list[Times] = []
    at = 0
    for entry in entries:
        placed.append(tuple(range(at, at + len(entry.t))))
        at += len(entry.t)
    return placed, tuple(range(at, at + chunk.count))


def sink_shift(entries: Sequence[Entry], chunk: Chunk) -> Placed:
    """SINK_SHIFT: the sink directly before the oldest other frame, the rest absolute (Deep Forcing's deep sink)."""
    rest = [t for entry in entries if entry.region != "sink" for t in entry.t]
    sinks = sum(len(entry.t) for entry in entries if entry.region == "sink")
    at = min([*rest, *chunk.frames]) - sinks
    placed: list[Times] = []
    for entry in entries:
        if entry.region == "sink":
            placed.append(tuple(at + i for i in range(len(entry.t))))
            at += len(entry.t)
        else:
            placed.append(entry.t)
    return placed, chunk.frames


def unified(entries: Sequence[Entry], chunk: Chunk, newest: int = 20) -> Placed:
    """UNIFIED: absolute until the newest frame reaches ``newest``, then the window slides while the newest stays there.

    The sink counts up from 0, so that every position is one the model was trained on (Echo-Infinity's unified relative
    RoPE, used here as an indexing rule). The other frames are never placed before the sink's end.
    """
    shift = max(0, chunk.frames[-1] - newest)
    sinks = sum(len(entry.t) for entry in entries if entry.region == "sink")
    placed: list[Times] = []
    at = 0
    for entry in entries:
        if entry.region == "sink":
            placed.append(tuple(range(at, at + len(entry.t))))
            at += len(entry.t)
        else:
            placed.append(tuple(max(t - shift, sinks) if shift else t for t in entry.t))
    return placed, tuple(t - shift for t in chunk.frames)


POSITIONS: dict[str, Callable[[Sequence[Entry], Chunk], Placed]] = {
    "abs": absolute,
    "slot": slot,
    "sink_shift": sink_shift,
    "unified": unified,
}


def rebase(base: int, lowest: float, newest: float, limit: int) -> int:
    """The number to subtract from all positions of a view.

    It stays as it is (so that rotated keys may be kept) until the newest position would leave ``[0, limit)`` or the
    lowest would be negative; then the lowest becomes 0 to 1. A view wider than ``limit`` (an absolute sink far behind)
    keeps growing: angles are computed in float64, so nothing runs out, but the model has not seen such distances.
    """
    if lowest < base or newest - base >= limit:
        return math.floor(lowest)
    return base

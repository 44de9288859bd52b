"""Times and counts of one stream. Flat in memory however long it runs. Knows nothing of models.

Definitions: *first frame* is the time from opening the stream to its first frame in the caller's hands, text encoding
included; the *period* of a chunk is the wall time of making it, all stages in (context pass of the chunk before, steps,
decoding, conversion); frames a second are frames of a chunk over its period, so the reader's own time is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from streamvid.output import VideoChunk

KEPT = 64


class Clock:
    """Wall time of the stages of one chunk. Stages that only queue work on a GPU end before the work does."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The stage ``stage`` ends now."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self.seconds["total"] = now - self._start
        self._last = now


class Meter:
    """What ``stream.stats()`` says about time."""

    def __init__(self) -> None:
        self._opened = time.perf_counter()
        self._first: float | None = None
        self._made: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT)
        self._delivered = 0

    def made(self, chunk: VideoChunk) -> None:
        """A chunk has been made."""
        self._made.append((len(chunk), dict(chunk.seconds)))

    def delivered(self, frames: int) -> None:
        """Frames went to the reader."""
        if self._first is None:
            self._first = time.perf_counter() - self._opened
        self._delivered += frames

    def report(self) -> dict[str, Any]:
        """JSON-ready; over the newest chunks, the first of a stream left out where there are others."""
        made = list(self._made)
        steady = made[1:] if len(made) > 1 and self._delivered <= sum(n for n, _ in made) else made
        periods = [seconds["total"] for _, seconds in steady]
        stages = {name for _, seconds in steady for name in seconds}
        return {
            "delivered": self._delivered,
            "first_frame_seconds": self._first,
            "chunk_seconds": statistics.median(periods) if periods else None,
            "fps": sum(n for n, _ in steady) / sum(periods) if periods else None,
            "stage_seconds": {
                name: statistics.median(seconds.get(name, 0.0) for _, seconds in steady)
                for name in sorted(stages)
            },
        }

"""Who computes next: one chunk at a time on a device, in the order of asking.

Chunks of several streams side by side would only take memory and cores from each other. Knows nothing of streams.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A fair lock: whoever asked first goes first. A plain lock would let a busy stream starve the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn, and hold it for the body."""
        mine = threading.Event()
        with self._lock:
            self._waiting.append(mine)
            if self._waiting[0] is mine:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.popleft()
                if self._waiting:
                    self._waiting[0].set()

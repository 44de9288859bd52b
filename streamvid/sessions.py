"""Which streams are open on a pipeline: a limit with words instead of running out of memory, and their bytes.

Knows nothing of what a stream does. Holds no stream alive.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from streamvid.errors import StreamvidError


class Session(Protocol):
    """What the register asks of a stream."""

    def nbytes(self) -> int:
        """Bytes of tensors that the stream holds."""
        ...


class Sessions:
    """The open streams of one pipeline.

    Args:
        limit: how many may be open at once.
    """

    def __init__(self, limit: int) -> None:
        if not isinstance(limit, int) or limit < 1:
            raise StreamvidError(f"max_streams must be a whole number of at least 1, got {limit!r}")
        self.limit = limit
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises StreamvidError when no further stream may be opened; asked before anything is allocated."""
        if len(self._open) >= self.limit:
            raise StreamvidError(
                f"{len(self._open)} streams are open and {self.limit} are allowed; "
                "close one, or load with a larger max_streams"
            )

    def enter(self, session: Session) -> None:
        """Count a stream. Raises StreamvidError when the limit is reached."""
        with self._lock:
            self.check()
            self._open.add(session)

    def leave(self, session: Session) -> None:
        """A stream was closed. A second call does nothing."""
        with self._lock:
            self._open.discard(session)

    def __len__(self) -> int:
        return len(self._open)

    def nbytes(self) -> int:
        """Bytes held by all open streams."""
        return sum(session.nbytes() for session in list(self._open))

"""A thread that makes chunks in advance of a slow reader, at most two. Knows nothing of what a chunk is.

The frames do not depend on it: each chunk is the same function of the state before it. Only the chunk at which a live
``set_prompt`` applies depends on how far the thread has come, and the receipt names it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamvid.stream import VideoStream


class Ahead:
    """The thread of one stream. It holds the stream only while it makes a chunk, so a dropped stream is freed.

    Args:
        stream: the stream; its ``_unread`` list is what is filled.
        chunks: how many chunks may wait unread, the one being read not counted.
    """

    def __init__(self, stream: VideoStream, chunks: int) -> None:
        self._stream = weakref.ref(stream)
        self._chunks = chunks
        self._stopped = False
        self._wake = threading.Event()
        """Set by the reader when it has taken a chunk."""
        self._ready = threading.Event()
        """Set by the thread when it has added a chunk, ended or failed."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="streamvid-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until there may be something to read. Raises what stopped the thread."""
        self._wake.set()
        self._ready.wait(0.2)
        self._ready.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self) -> None:
        """End the thread; it finishes the chunk it is making."""
        self._stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=60)

    def _make_one(self, stream: VideoStream) -> bool:
        """Make one more chunk unless enough wait unread besides the one being read. False: nothing was made."""
        with stream._lock:
            full = len(stream._unread) > self._chunks
            if stream._closed or full or stream._ended() or not stream._running.is_set():
                return False
            stream._unread.append(stream._produce())
            return True

    def _run(self) -> None:
        while not self._stopped:
            stream = self._stream()
            if stream is None:
                return
            try:
                busy = self._make_one(stream)
            except BaseException as error:
                self._error = error
                busy = False
            del stream
            self._ready.set()
            if not busy:
                self._wake.wait(0.2)
                self._wake.clear()

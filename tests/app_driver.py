"""A page without a browser: collects what a session says and acknowledges frames as they come."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application on a free port, served by a thread, as its address."""
    import uvicorn

    from streamvid.app.launch import bind

    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)


class Page:
    """Stands for the page of one session; give its ``emit`` to the session and the session to ``of``."""

    def __init__(self, *, shows: bool = True) -> None:
        self.messages: list[dict[str, Any]] = []
        self.chunks: list[tuple[dict[str, Any], np.ndarray]] = []
        self.shows = shows
        """Whether frames count as shown at once; False is a tab in the background."""
        self.session: Any = None
        self._news = threading.Condition()

    def emit(self, message: dict[str, Any] | bytes) -> None:
        with self._news:
            if isinstance(message, bytes):
                self.chunks.append(unpack(message))
            else:
                self.messages.append(message)
            self._news.notify_all()
        if isinstance(message, bytes) and self.shows and self.session is not None:
            header = self.chunks[-1][0]
            self.session.acknowledge(header["epoch"], header["lane"], self.frames(header["lane"]).shape[0])

    def of_epoch(self, lane: int = 0) -> list[tuple[dict[str, Any], np.ndarray]]:
        """Chunks of a lane since the last beginning."""
        epoch = self.session.epoch
        return [(h, f) for h, f in self.chunks if h["epoch"] == epoch and h["lane"] == lane]

    def frames(self, lane: int = 0) -> np.ndarray:
        """Frames of a lane since the last beginning, ``[n, H, W, 3]``."""
        return np.concatenate([frames for _, frames in self.of_epoch(lane)])

    def wait(self, condition: Any, seconds: float = 60.0) -> None:
        """Until ``condition()`` holds; an AssertionError after ``seconds``."""
        end = time.monotonic() + seconds
        with self._news:
            while not condition():
                left = end - time.monotonic()
                assert left > 0, f"waited {seconds} s in vain; messages: {self.messages[-3:]}"
                self._news.wait(min(left, 0.1))


def unpack(message: bytes) -> tuple[dict[str, Any], np.ndarray]:
    """A packed chunk of raw frames as header and ``[n, H, W, 3]`` uint8."""
    (length,) = struct.unpack_from("<I", message)
    header = json.loads(message[4 : 4 + length])
    assert header["encoding"] == "rgb"
    shape = (header["count"], header["height"], header["width"], 3)
    return header, np.frombuffer(message, np.uint8, offset=4 + length).reshape(shape)

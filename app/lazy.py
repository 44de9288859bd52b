"""An ASGI application that is built at its first request and ended with the server. Knows nothing of what it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


class Lazy:
    """Stands for the application that ``build`` (called once, in a thread) returns; paths are passed as they are.

    Args:
        build: makes a Starlette or FastAPI application. When it fails, the next request tries again.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._app: Any = None
        self._lock = asyncio.Lock()
        self._stop = asyncio.Event()
        self._life: asyncio.Task | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._lock:
            if self._app is None:
                app = await asyncio.to_thread(self._build)
                ready = asyncio.Event()
                self._life = asyncio.create_task(self._live(app, ready))
                waiting = asyncio.create_task(ready.wait())
                await asyncio.wait({waiting, self._life}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not ready.is_set():
                    self._life.result()  # says why the start failed
                self._app = app
        await self._app(scope, receive, send)

    async def _live(self, app: Any, ready: asyncio.Event) -> None:
        """Start-up and shut-down of the application, in one task as its libraries want it."""
        async with app.router.lifespan_context(app):
            ready.set()
            await self._stop.wait()

    async def close(self) -> None:
        """End the application, if it was built."""
        self._stop.set()
        if self._life is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._life

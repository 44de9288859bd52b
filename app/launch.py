"""Start the web server of the demo and, if wanted, the browser.

Knows nothing of pages or streams.
"""

from __future__ import annotations

import importlib.util
import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

from streamvid.errors import StreamvidError

NEEDED = ("fastapi", "gradio", "uvicorn", "websockets")


def launch(
    model: str,
    *,
    host: str,
    port: int,
    max_streams: int,
    max_bytes: int | None,
    password: str | None,
    open_browser: bool,
    device: str | None,
    dtype: str | None,
    say: Callable[[str], Any],
) -> None:
    """Serve until interrupted. Raises StreamvidError when a package is missing or the port is taken."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise StreamvidError(f"the demo needs {', '.join(missing)}; run: pip install 'streamvid[app]'")
    import uvicorn

    from streamvid.app.auth import LOOPBACK
    from streamvid.app.hub import Hub
    from streamvid.app.server import build
    from streamvid.app.session import sweep

    local = host in LOOPBACK
    listener = bind(host, port)
    sweep()
    hub = Hub(
        model,
        lambda name: _load(name, max_streams=max_streams, device=device, dtype=dtype),
        max_streams=max_streams,
        max_bytes=max_bytes,
        choose_models=local,
    )
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}/"
    say(f"streamvid app on {url} (Ctrl+C ends it)")
    if open_browser:
        threading.Timer(0.5, webbrowser.open, (url,)).start()
    config = uvicorn.Config(
        build(hub, password=password, local_only=local),
        log_level="warning",
        ws_max_size=512 * 1024,
        ws_per_message_deflate=False,  # pictures do not shrink, and it costs more time than it saves
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address. Raises StreamvidError when it is taken or does not exist."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StreamvidError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another --port, 0 takes a free one"
        ) from None
    return listener


def _load(name: str, *, max_streams: int, device: str | None, dtype: str | None) -> Any:
    import streamvid

    # Two more than the tabs may have: a stream is opened before the one it replaces is closed.
    return streamvid.load(name, device=device, dtype=dtype, max_streams=max_streams + 2)

"""The web application: the page, one WebSocket a tab, clips to save, uploads to start from, and Gradio's pages.

Knows nothing of streams beyond calling ``protocol`` and ``session``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.background import BackgroundTask
from starlette.routing import Route

from streamvid.app.auth import COOKIE, Gate
from streamvid.app.hub import Hub
from streamvid.app.lane import write_mp4
from streamvid.app.lazy import Lazy
from streamvid.app.protocol import handle, hello
from streamvid.app.session import Session
from streamvid.app.uploads import MAX_UPLOAD, store_start
from streamvid.errors import StreamvidError

HERE = Path(__file__).parent
ASSETS = {
    "page.css": "text/css",
    "main.js": "text/javascript",
    "stage.js": "text/javascript",
    "panels.js": "text/javascript",
    "pictures.js": "text/javascript",
    "login.js": "text/javascript",
}
OPEN = ("/login", "/asset/page.css", "/asset/login.js")
"""Paths that need no password."""
MAX_MESSAGE = 256 * 1024
"""Bytes of one message from the page."""
PLAIN = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
)
GRADIO = (  # its page has scripts in it and makes functions from text; still nothing from elsewhere
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob: data:; font-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'"
)
"""Content security policies: the browser fetches nothing from other machines."""
log = logging.getLogger(__name__)


def build(hub: Hub, *, password: str | None = None, local_only: bool = True) -> FastAPI:
    """The application over a hub.

    Args:
        password: asked for before anything else is shown; None asks nobody.
        local_only: requests must name the loopback address.
    """
    gate = Gate(password, local_only=local_only)
    tabs: dict[str, Session] = {}
    gradio = Lazy(lambda: _gradio_app(hub))

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        # Load while the page is being opened. A failure is told to the first tab, which tries again.
        loading = asyncio.get_running_loop().run_in_executor(None, _preload, hub)
        yield
        await loading
        await gradio.close()
        await asyncio.to_thread(hub.close)

    app = FastAPI(title="streamvid", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        if not gate.trusts(request.headers):
            return Response("this address does not name this server\n", status_code=403)
        if not gate.allows(request.cookies) and request.url.path not in OPEN:
            if request.url.path in ("/", "/gradio", "/gradio/"):
                return RedirectResponse("/login", status_code=303)
            return Response("log in first\n", status_code=401)
        response = await call_next(request)
        gradio = request.url.path.startswith("/gradio")
        response.headers["Content-Security-Policy"] = GRADIO if gradio else PLAIN
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers.setdefault("Cache-Control", "no-cache")
        return response

    _add_pages(app, gate)
    _add_files(app, hub, tabs)
    app.router.routes.append(Route("/gradio/{rest:path}", gradio))

    @app.websocket("/socket")
    async def socket(ws: WebSocket) -> None:
        if not (gate.trusts(ws.headers) and gate.allows(ws.cookies)):
            await ws.close(code=4403)
            return
        await ws.accept()
        await _serve_tab(ws, hub, tabs)

    return app


def _gradio_app(hub: Hub) -> FastAPI:
    from streamvid.app.blocks import build_blocks, mount

    inner = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    return mount(inner, build_blocks(hub), "/gradio", MAX_UPLOAD)


def _preload(hub: Hub) -> None:
    with contextlib.suppress(Exception):  # the tab that asks for it gets the words
        hub.pipe(hub.default_model)


def _add_pages(app: FastAPI, gate: Gate) -> None:
    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(HERE / "page.html", media_type="text/html")

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/asset/{name}")
    def asset(name: str) -> Response:
        if name not in ASSETS:
            return Response("no such file\n", status_code=404)
        return FileResponse(HERE / name, media_type=ASSETS[name])

    @app.get("/login")
    def login_page() -> FileResponse:
        return FileResponse(HERE / "login.html", media_type="text/html")

    @app.post("/login")
    async def login(request: Request) -> Response:
        key = gate.login((await _body(request, 1024)).decode(errors="replace"))
        if key is None:
            await asyncio.sleep(0.5)  # guessing takes time
            return HTMLResponse("wrong password", status_code=403)
        answer = Response(status_code=204)
        answer.set_cookie(COOKIE, key, httponly=True, samesite="strict")
        return answer


def _add_files(app: FastAPI, hub: Hub, tabs: dict[str, Session]) -> None:
    @app.get("/tab/{token}/clip.mp4")
    async def clip(token: str, last: int | None = None) -> Response:
        session = tabs.get(token)
        if session is None or (last is not None and last < 1):
            return Response("no such tab, or no frame wanted\n", status_code=404)
        path = session.folder / "clip.mp4"
        try:
            count = await asyncio.to_thread(write_mp4, path, list(session.lanes), last)
        except (ValueError, IndexError) as error:
            return JSONResponse({"text": str(error)}, status_code=409)
        return FileResponse(
            path,
            media_type="video/mp4",
            filename="streamvid.mp4",
            headers={"X-Frames": str(count)},
            background=BackgroundTask(path.unlink, missing_ok=True),
        )

    @app.put("/tab/{token}/start/{name}")
    async def upload(token: str, name: str, request: Request) -> Response:
        session = tabs.get(token)
        if session is None:
            return Response("no such tab\n", status_code=404)
        config = hub.pipe(session.model).config
        try:
            data = await _body(request, MAX_UPLOAD)
            size = (config.height, config.width)
            kind = await asyncio.to_thread(store_start, data, name, session.folder, size)
        except StreamvidError as error:
            return JSONResponse({"text": str(error)}, status_code=413)
        return JSONResponse({"kind": kind})


async def _body(request: Request, most: int) -> bytes:
    """The body of a request, refused as soon as it is too long."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise StreamvidError(f"the upload is over the limit of {most // 1024} KiB")
    return bytes(data)


async def _serve_tab(ws: WebSocket, hub: Hub, tabs: dict[str, Session]) -> None:
    """A tab from its first message to its last; its session is freed however it ends."""
    loop, outbox = asyncio.get_running_loop(), asyncio.Queue()

    def emit(message: dict[str, Any] | bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ended while a chunk was made
            loop.call_soon_threadsafe(outbox.put_nowait, message)

    session = Session(hub, emit)
    tabs[session.token] = session
    sender = asyncio.create_task(_send(ws, outbox))
    try:
        emit({"type": "loading", "model": session.model})
        await _answer(hub, session, emit, None)
        while (text := await _next_text(ws)) is not None:
            session.heard()
            if len(text) > MAX_MESSAGE:
                emit({"type": "error", "text": "the message is too long"})
                continue
            await _receive(hub, session, emit, text)
    finally:
        sender.cancel()
        tabs.pop(session.token, None)
        await asyncio.to_thread(session.close)


async def _next_text(ws: WebSocket) -> str | None:
    """The next message of the page; None when it has gone, or speaks another language than text."""
    try:
        return await ws.receive_text()
    except (WebSocketDisconnect, RuntimeError, KeyError):  # gone, gone while something was sent, binary
        return None


async def _send(ws: WebSocket, outbox: asyncio.Queue) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the page has gone; the reader notices too
        while True:
            message = await outbox.get()
            if isinstance(message, bytes):
                await ws.send_bytes(message)
            else:
                await ws.send_text(json.dumps(message))


async def _receive(hub: Hub, session: Session, emit: Any, text: str) -> None:
    try:
        message = json.loads(text)
    except json.JSONDecodeError:
        emit({"type": "error", "text": "a message must be JSON"})
        return
    if isinstance(message, dict) and message.get("type") == "shown":  # the frequent one, and it never waits
        numbers = [message.get(name) for name in ("epoch", "lane", "frames")]
        if all(isinstance(number, int) for number in numbers):
            session.acknowledge(*numbers)
        return
    await _answer(hub, session, emit, message)


async def _answer(hub: Hub, session: Session, emit: Any, message: Any) -> None:
    """Handle a message (None: say hello) in a thread; a mistake is answered with its sentence."""
    try:
        if message is None:
            answer = await asyncio.to_thread(hello, hub, session)
        else:
            answer = await asyncio.to_thread(handle, hub, session, message)
    except (ValueError, TypeError, OSError) as error:
        emit({"type": "error", "text": " ".join(str(error).split())})
    except Exception:  # the outermost layer: one tab's fault is not the others'
        log.exception("a message could not be handled")
        emit(
            {
                "type": "error",
                "text": "that did not work, and it is a fault of ours; the server's log says more",
            }
        )
    else:
        if answer is not None:
            emit(answer)

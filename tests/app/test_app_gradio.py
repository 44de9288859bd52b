"""The Gradio pages of the demo: clips through its API, limits, the password, and nothing sent to other machines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import streamvid
from streamvid.app.clips import MAX_FRAMES, make_clip
from streamvid.app.hub import Hub
from streamvid.app.lazy import Lazy
from streamvid.app.server import build
from streamvid.app.settings import TabSettings
from streamvid.errors import StreamvidError
from streamvid.video_io import VideoReader

pytest.importorskip("gradio")
testclient = pytest.importorskip("starlette.testclient")
LOCAL = ("127.0.0.1", "localhost", "::1", "testserver", "0.0.0.0", "")


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    return streamvid.load(tiny_random_folder, device="cpu", max_streams=6)


@pytest.fixture(scope="module")
def outside():
    """Addresses on other machines that this process connected to or looked up."""
    found: list[str] = []

    def hook(event, arguments):
        if event == "socket.getaddrinfo":
            found.append(str(arguments[0] or ""))
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            found.append(str(arguments[1][0]))

    sys.addaudithook(hook)
    return lambda: [name for name in found if name not in LOCAL]


@pytest.fixture(scope="module")
def address(pipe, outside):
    """A running server; its hub allows one stream."""
    from app_driver import running

    hub = Hub("random", lambda name: pipe, max_streams=1, choose_models=False)
    with running(build(hub)) as url:
        yield url, hub


def test_a_clip_through_the_api_and_mistakes_in_one_sentence(address, outside, tmp_path):
    from gradio_client import Client

    url, hub = address
    client = Client(f"{url}gradio/", verbose=False, download_files=tmp_path)
    video, note = client.predict("red ball", 20, 3, "window:size=9", "int4", "none", api_name="/clip")
    with VideoReader(video) as reader:
        assert len(list(reader)) == 20
    assert note == "20 frames, seed 3"
    assert hub.num_streams() == 0 and hub.nbytes() == 0
    for wrong, words in (("windw", "did you mean 'window'"), ("full:size=x", "full")):
        with pytest.raises(Exception, match=words):
            client.predict("red ball", 20, 3, wrong, "none", "none", api_name="/clip")
    hub.default_model = "tiny"
    _, found = client.predict("tiny", api_name="/checkpoint")
    assert "/" not in found["parts"][0]["file"]  # visitors of a server for one model see no folders
    hub.default_model = "random"
    with pytest.raises(Exception, match="shows one model only"):
        client.predict("/etc/passwd", api_name="/checkpoint")
    assert outside() == []


def test_a_clip_ended_early_leaves_nothing_and_limits_hold(pipe, tmp_path):
    hub = Hub("random", lambda name: pipe, max_streams=1)
    settings = TabSettings(prompt="red ball")
    work = make_clip(hub, settings, 50, tmp_path / "clip.mp4")
    assert next(work) == 9 and hub.num_streams() == 1 and hub.nbytes() > 0
    with pytest.raises(StreamvidError, match="1 streams are open and 1 are allowed"):
        next(make_clip(hub, settings, 50, tmp_path / "second.mp4"))
    work.close()
    assert hub.num_streams() == len(pipe.sessions) == 0 and not list(Path(tmp_path).iterdir())
    with pytest.raises(StreamvidError, match=f"from 1 to {MAX_FRAMES}"):
        next(make_clip(hub, settings, MAX_FRAMES + 1, tmp_path / "clip.mp4"))


def test_gradio_is_behind_the_same_gate(pipe):
    hub = Hub("random", lambda name: pipe)
    with testclient.TestClient(build(hub, password="word"), base_url="http://localhost") as client:
        assert client.get("/gradio/", follow_redirects=False).headers["location"] == "/login"
        for path in ("/gradio/config", "/gradio/gradio_api/info", "/gradio/gradio_api/queue/data"):
            assert client.get(path).status_code == 401
        assert client.post("/gradio/gradio_api/upload", files={"files": b"x"}).status_code == 401
        client.post("/login", content="word")
        page = client.get("/gradio/")
        assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
        assert "api.gradio.app" not in page.text and "googleapis" not in page.text
        assert client.get("/gradio/config", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/gradio/config", headers={"origin": "http://evil.example"}).status_code == 403
        for path in ("pyproject.toml", "/etc/hostname"):
            assert client.get(f"/gradio/gradio_api/file={path}").status_code in (403, 404)
        too_much = {"files": b"x" * (33 * 2**20)}
        assert client.post("/gradio/gradio_api/upload", files=too_much).status_code == 413


def test_a_lazy_application_that_cannot_be_built_is_tried_again():
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    tries, answers = [], []

    def make():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])

    async def ask(lazy):
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}

        async def send(message):
            answers.append(message.get("body", b""))

        await lazy(scope, None, send)

    async def play():
        lazy = Lazy(make)
        with pytest.raises(OSError):
            await ask(lazy)
        await asyncio.gather(ask(lazy), ask(lazy))
        await lazy.close()

    asyncio.run(play())
    assert len(tries) == 2 and answers.count(b"here") == 2

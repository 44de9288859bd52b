"""The web application of the demo over its routes, and the command's refusals. No browser; a random model."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from app_driver import unpack

import streamvid
from streamvid.app.auth import Gate
from streamvid.app.hub import Hub
from streamvid.app.server import ASSETS, build
from streamvid.app.uploads import fit, store_start
from streamvid.cli import main
from streamvid.commands.app import parse_bytes
from streamvid.errors import StreamvidError
from streamvid.video_io import VideoReader, VideoWriter

testclient = pytest.importorskip("starlette.testclient")


@pytest.fixture
def hub(tiny_random_folder):
    pipe = streamvid.load(tiny_random_folder, device="cpu")
    return Hub("random", lambda name: pipe)


def client_of(hub, **options):
    return testclient.TestClient(build(hub, **options), base_url="http://localhost")


def receive(ws, kind):
    """The next message of a kind; chunks are unpacked."""
    for _ in range(300):
        message = ws.receive()
        if message.get("bytes") is not None:
            if kind == "chunk":
                return unpack(message["bytes"])
        elif json.loads(message["text"])["type"] == kind:
            return json.loads(message["text"])
    raise AssertionError(f"no {kind} message came")


def test_a_tab_from_hello_to_a_saved_clip(hub, tmp_path):
    with client_of(hub) as client:
        assert "streamvid" in client.get("/").text
        for name in ASSETS:
            assert client.get(f"/asset/{name}").status_code == 200
        assert client.get("/asset/server.py").status_code == 404
        with client.websocket_connect("ws://localhost/socket") as ws:
            token = receive(ws, "hello")["token"]
            early = client.get(f"/tab/{token}/clip.mp4")
            assert early.status_code == 409 and "no stream" in early.json()["text"]
            ws.send_text(json.dumps({"type": "start", "settings": {"prompt": "red ball"}}))
            receive(ws, "started")
            header, frames = receive(ws, "chunk")
            assert frames.shape == (9, 64, 64, 3) and header["memory"]["total"] > 0
            ws.send_text(json.dumps({"type": "pause"}))
            ws.send_text("not json")
            assert "JSON" in receive(ws, "error")["text"]
            answer = client.get(f"/tab/{token}/clip.mp4?last=5")
            (tmp_path / "clip.mp4").write_bytes(answer.content)
            with VideoReader(tmp_path / "clip.mp4") as reader:
                assert len(list(reader)) == 5 == int(answer.headers["X-Frames"])
            refused = client.put(f"/tab/{token}/start/clip.txt", content=b"x")
            assert refused.status_code == 413 and ".txt" in refused.json()["text"]
    assert hub.num_streams() == 0 and hub.nbytes() == 0  # the browser tests close one tab of a living server


def test_a_stream_goes_on_from_an_uploaded_clip(hub, tmp_path):
    with VideoWriter(tmp_path / "clip.mp4", fps=8) as writer:
        for level in range(9):
            writer.add(np.full((96, 128, 3), 20 * level, np.uint8))
    with client_of(hub) as client, client.websocket_connect("ws://localhost/socket") as ws:
        token = receive(ws, "hello")["token"]
        answer = client.put(f"/tab/{token}/start/clip.mp4", content=(tmp_path / "clip.mp4").read_bytes())
        assert answer.json() == {"kind": "video"}
        ws.send_text(json.dumps({"type": "start", "settings": {"prompt": "red ball"}, "begin": True}))
        header, _ = receive(ws, "chunk")
        assert header["start_frame"] == 0 and header["index"] == 1  # chunk 0 is the clip


def test_a_password_is_asked_before_anything(hub):
    with client_of(hub, password="word", local_only=False) as client:
        assert client.get("/", follow_redirects=False).headers["location"] == "/login"
        assert client.get("/asset/main.js").status_code == 401
        with pytest.raises(testclient.WebSocketDisconnect), client.websocket_connect("ws://localhost/socket"):
            pass
        assert client.post("/login", content="wrong").status_code == 403
        assert client.post("/login", content="word").status_code == 204
        assert client.get("/asset/main.js").status_code == 200
        with client.websocket_connect("ws://localhost/socket") as ws:
            assert receive(ws, "hello")["model"] == "random"


@pytest.mark.parametrize(
    ("headers", "trusted"),
    [
        ({"host": "localhost:7860"}, True),
        ({"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}, True),
        ({"host": "[::1]:7860", "origin": "http://[::1]:7860"}, True),
        ({"host": "evil.example:7860"}, False),
        ({"host": "localhost:7860", "origin": "http://evil.example"}, False),
        ({}, False),
    ],
)
def test_only_pages_of_this_server_reach_it(headers, trusted):
    assert Gate(None, local_only=True).trusts(headers) is trusted


def test_the_command_refuses_in_one_sentence(capsys):
    assert main(["app", "--host", "0.0.0.0", "--no-browser"]) == 2
    assert "needs a password" in capsys.readouterr().err
    assert main(["app", "--max-bytes", "lots"]) == 2
    assert "500MB" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["app", "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err
    assert parse_bytes("1.5GB") == 1_500_000_000 and parse_bytes("2k") == 2000 and parse_bytes("7") == 7


def test_an_upload_is_fitted_and_what_is_no_picture_is_refused(tmp_path):
    from PIL import Image

    picture = np.zeros((30, 90, 3), np.uint8)
    picture[:, 30:60] = 200
    assert (fit(picture, (64, 64)) == 200).all()  # the middle
    Image.fromarray(picture).save(tmp_path / "p.png")
    assert store_start((tmp_path / "p.png").read_bytes(), "p.png", tmp_path, (64, 64)) == "image"
    assert Image.open(tmp_path / "start.png").size == (64, 64)
    with pytest.raises(StreamvidError):
        store_start(b"no picture", "x.png", tmp_path, (64, 64))
    with pytest.raises(StreamvidError):
        store_start(b"no video", "x.mp4", tmp_path, (64, 64))
    assert not list(tmp_path.glob("upload*"))

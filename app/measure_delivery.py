"""``python -m streamvid.app.measure_delivery``: how frames get to the browser best, and what Gradio's page costs.

The embedded model makes frames as fast as it can; each carries its number in a row of black and white squares. A
headless Chromium reads the number off what it shows at every repaint. Prints a Markdown table of frames made, seen, and
how old a frame is when it is seen; then the seconds from the command to the first picture, with and without Gradio.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import streamvid
from streamvid.app.chromium import MOVING, chromium, served

PROMPT = "a big red ball sliding from side to side on a navy background"
WATCH = """(element) => { const canvas = document.createElement("canvas"); const seen = (window.seen = []);
  canvas.width = canvas.height = 64; const ctx = canvas.getContext("2d", {willReadFrequently: true}); let last = -1;
  const look = () => { const source = element(); if (source && (source.naturalWidth || source.width)) {
      ctx.drawImage(source, 0, 0, 64, 64); const row = ctx.getImageData(0, 2, 64, 1).data; let number = 0;
      for (let i = 0; i < 8; i++) number = number * 2 + (row[4 * (8 * i + 4)] > 127 ? 1 : 0);
      if (number !== last) { seen.push([number, Date.now()]); last = number; } }
    requestAnimationFrame(look); }; look(); }"""
WAYS = {
    "Gradio image": ("/gradio/", "document.querySelector('#out img')"),
    "MJPEG": ("/mjpeg", "document.querySelector('img')"),
    "WebSocket and canvas": ("/?pace=made", "window.streamvid?.stage.screens[0]?.small"),
}


class Source:
    """Frames of the embedded model with their number in the top row, and when each was made."""

    def __init__(self) -> None:
        self.pipe = streamvid.load("tiny", max_streams=8)
        self.made: list[float] = []
        """Seconds (time.time) at which each frame existed; its index modulo 256 is in the picture."""

    def mark(self, frames: np.ndarray) -> np.ndarray:
        """The frames ``[n, 64, 64, 3]`` with their numbers, which are noted as made now."""
        frames = frames.copy()
        for frame in frames:
            bits = np.unpackbits(np.array([len(self.made) % 256], np.uint8))
            frame[:8] = (255 * np.repeat(bits, 8))[None, :, None]
            self.made.append(time.time())
        return frames

    def paced(self) -> Iterator[np.ndarray]:
        """Frames at the pace at which they are made, while a thread makes the next chunk."""
        ready: queue.Queue[np.ndarray] = queue.Queue(maxsize=1)
        ended = threading.Event()

        def make() -> None:
            with self.pipe.stream(PROMPT) as stream:
                for chunk in stream.chunks():
                    frames = self.mark(chunk.frames)
                    while not ended.is_set():
                        with contextlib.suppress(queue.Full):
                            ready.put(frames, timeout=0.1)
                            break
                    if ended.is_set():
                        return

        threading.Thread(target=make, daemon=True).start()
        try:
            before = time.perf_counter()
            while True:
                frames = ready.get(timeout=60)
                period = min(1.0, time.perf_counter() - before)
                before = due = time.perf_counter()
                for frame in frames:
                    yield frame
                    due += 0.9 * period / len(frames)
                    time.sleep(max(0.0, due - time.perf_counter()))
        finally:
            ended.set()


def build_server(source: Source) -> Any:
    """The demo itself, with two more ways to deliver the same frames."""
    import cv2
    import gradio as gr
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, StreamingResponse

    from streamvid.app import session
    from streamvid.app.hub import Hub
    from streamvid.app.server import build

    pack = session.pack
    session.pack = lambda header, frames: pack(header, source.mark(frames))
    app = FastAPI()

    def parts() -> Iterator[bytes]:
        for frame in source.paced():
            data = cv2.imencode(".jpg", frame[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
            yield b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + data + b"\r\n"

    @app.get("/mjpeg")
    def page() -> HTMLResponse:
        return HTMLResponse('<img src="/mjpeg/stream" width="512">')

    @app.get("/mjpeg/stream")
    def stream() -> StreamingResponse:
        return StreamingResponse(parts(), media_type="multipart/x-mixed-replace; boundary=frame")

    with gr.Blocks(analytics_enabled=False) as blocks:
        out = gr.Image(format="jpeg", elem_id="out")
        blocks.load(source.paced, None, out, show_progress="hidden")
    gr.mount_gradio_app(app, blocks, "/gradio", ssr_mode=False, run_history=False)
    app.mount("/", build(Hub("tiny", lambda name: source.pipe)))
    return app


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """The application on a free port, as its address."""
    import uvicorn

    from streamvid.app.launch import bind

    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def measure(browser: Any, url: str, source: Source, way: str, seconds: float) -> dict[str, float]:
    """Rates in frames/s and ages in seconds of what a page shows once it has settled.

    A number on the screen is that of the oldest frame that can be meant: at most 200 older than the newest one made.
    """
    path, element = WAYS[way]
    page = browser.new_page(bypass_csp=True, viewport={"width": 900, "height": 700})
    page.goto(url + path, wait_until="commit")
    page.wait_for_timeout(2000)
    page.evaluate(f"() => ({WATCH})(() => {element})")
    page.wait_for_function("window.seen?.length > 3", timeout=60_000)
    page.wait_for_timeout(2000)
    page.evaluate("window.seen.length = 0")
    begun = len(source.made)
    page.wait_for_timeout(1000 * seconds)
    seen = page.evaluate("window.seen")
    page.close()
    ages, numbers = [], [max(0, begun - 200)]
    for low, shown in seen:
        numbers.append(numbers[-1] + (low - numbers[-1]) % 256)
        ages.append(shown / 1000 - source.made[numbers[-1]])
    gaps = np.diff([shown for _, shown in seen]) / 1000
    return {
        "made": (numbers[-1] - numbers[1]) / gaps.sum(),
        "shown": len(gaps) / gaps.sum(),
        "age": float(np.median(ages)),
        "gap": float(np.percentile(gaps, 95)),
    }


def first_picture(browser: Any, path: str) -> tuple[float, float, float]:
    """Seconds from the command ``streamvid app`` to the first frame and to the page, and of the server's processor."""
    import psutil

    begun = time.perf_counter()
    with served() as (url, process):
        page = browser.new_page(bypass_csp=True)
        page.goto(url + path, wait_until="commit")
        page.wait_for_selector("#pause", timeout=120_000)
        opened = time.perf_counter() - begun
        page.wait_for_function(MOVING, timeout=120_000)
        found = time.perf_counter() - begun
        spent = psutil.Process(process.pid).cpu_times()
        page.close()
    return found, opened, spent.user + spent.system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m streamvid.app.measure_delivery", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way")
    seconds = parser.parse_args().seconds
    source = Source()
    with running(build_server(source)) as url, chromium() as browser:
        print("| way | made /s | shown /s | shown | age of a frame (median) | gap between frames (95 %) |")
        print("| --- | --- | --- | --- | --- | --- |")
        for way in WAYS:
            found = measure(browser, url, source, way, seconds)
            print(
                f"| {way} | {found['made']:.1f} | {found['shown']:.1f} | {found['shown'] / found['made']:.0%} | "
                f"{1000 * found['age']:.0f} ms | {1000 * found['gap']:.0f} ms |",
                flush=True,
            )
    start_times()


def start_times() -> None:
    """Print how long the two pages take from the command on."""
    with chromium() as browser:
        for name, path in (("plain page", ""), ("Gradio page", "gradio/")):
            (low, *_), (middle, opened, spent), (high, *_) = sorted(
                first_picture(browser, path) for _ in range(3)
            )
            print(
                f"{name}: there {opened:.1f} s after the command, first picture {middle:.1f} s "
                f"({low:.1f} to {high:.1f}); {spent:.1f} s of processor time in the server",
                flush=True,
            )


if __name__ == "__main__":
    main()

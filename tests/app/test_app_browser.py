"""The demo in a real browser: headless Chromium on the page, judged by the pixels that it shows.

Frames up to 128x128 go to the browser uncompressed, so what it shows must equal a run in Python exactly.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from itertools import islice

import numpy as np
import pytest
import tiny_random

import streamvid
from streamvid.app.hub import Hub
from streamvid.app.launch import bind
from streamvid.video_io import VideoReader

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
uvicorn = pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
CURRENT = """() => { const c = streamvid.stage.screens[0].current;
  return {frame: c.frame, chunk: c.header.index, size: [c.picture.height, c.picture.width],
    data: [...c.picture.data]}; }"""
RATES = """() => { const s = streamvid.stage;
  return {shown: s.shownRate(), made: s.madeRate, frames: s.screens[0].shown}; }"""
FPS = 24.0


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A running server of a random model, as (address, hub, pipeline)."""
    from streamvid.app.server import build

    folder = tiny_random.save_folder(tmp_path_factory.mktemp("models") / "fast", config={"fps": FPS})
    pipe = streamvid.load(folder, device="cpu")
    hub = Hub("random", lambda name: pipe)
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build(hub), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/", hub, pipe
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def browser():
    os.environ.setdefault("PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(site, browser):
    """Opens a tab and waits for its first picture."""
    pages = []

    def opened(query):
        page = browser.new_page(bypass_csp=True, viewport={"width": 900, "height": 700})
        page.on("pageerror", lambda error: pytest.fail(f"the page failed: {error}"))
        page.goto(site[0] + query)
        page.wait_for_function("window.streamvid?.stage.screens[0]?.current", timeout=60000)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        if not page.is_closed():
            page.close()


def current(page):
    """Number of the frame on the screen, of its chunk, and its pixels ``[H, W, 3]``."""
    found = page.evaluate(CURRENT)
    return (
        found["frame"],
        found["chunk"],
        np.array(found["data"], np.uint8).reshape(*found["size"], 4)[..., :3],
    )


def after(page, frame):
    page.wait_for_function(f"streamvid.stage.screens[0].current.frame >= {frame}", timeout=60000)


def test_frames_change_pause_stops_them_and_a_prompt_shows_in_the_pixels(site, visit, tmp_path, capsys):
    page = visit("?prompt=red+ball&seed=3")
    after(page, 30)
    page.wait_for_timeout(1500)
    rates = page.evaluate(RATES)
    page.fill("#prompt", "blue cube")
    page.keyboard.press("Enter")
    page.wait_for_function("streamvid.page.latency", timeout=60000)
    latency = page.evaluate("streamvid.page.latency")
    page.click("#pause")
    frame, chunk, picture = current(page)
    page.wait_for_timeout(400)
    assert current(page)[0] == frame  # paused
    page.click("#step")
    after(page, frame + 12)
    assert current(page)[1] == chunk + 1
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "clip.mp4")
    with VideoReader(tmp_path / "clip.mp4") as reader:
        saved = list(reader)
    assert len(saved) > frame and saved[0].shape == (64, 64, 3)

    prompts = page.evaluate("[...document.querySelectorAll('#timeline li')].map((item) => item.textContent)")
    begins = int(prompts[1].split(":")[0])
    with site[2].stream("red ball", seed=3) as stream:
        stream.set_prompt("blue cube", at_frame=begins)
        changed = list(islice(stream, frame + 1))[frame]
    with site[2].stream("red ball", seed=3) as stream:
        unchanged = list(islice(stream, frame + 1))[frame]
    assert np.array_equal(picture, changed)
    assert not np.array_equal(picture, unchanged)
    with capsys.disabled():
        print(
            f"\nshown {rates['shown']:.1f} frames/s of {FPS:.0f} (could make {rates['made']:.0f}), "
            f"prompt to picture {latency:.0f} ms"
        )


def test_two_tabs_equal_solo_runs_and_closing_one_frees_it(site, visit):
    _, hub, pipe = site
    tabs = {seed: visit(f"?prompt=green+star&seed={seed}") for seed in (11, 12)}
    for seed, page in tabs.items():
        page.bring_to_front()
        after(page, 15)
        page.click("#pause")
        frame, _, picture = current(page)
        with pipe.stream("green star", seed=seed) as stream:
            assert np.array_equal(picture, list(islice(stream, frame + 1))[frame])
    assert hub.num_streams() == 2
    held = hub.nbytes()
    tabs[11].close()
    end = time.monotonic() + 30
    while hub.num_streams() > 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert hub.num_streams() == 1 and hub.nbytes() < held


def test_every_control_is_alive_on_a_phone(site, visit):
    page = visit("?prompt=red+ball")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#snapshot")
    page.wait_for_selector("#snapshots figure")
    page.select_option("#set-codec", "int4")
    page.wait_for_function("document.getElementById('cost').textContent.includes('will hold')")
    page.click("#compare")
    page.wait_for_function("streamvid.stage.screens[1]?.current", timeout=60000)
    assert "Int4" in page.inner_text("#screens figure:nth-child(2) figcaption")
    page.click("#snapshots figure")
    page.wait_for_function("streamvid.stage.screens.length === 1", timeout=60000)
    assert page.is_hidden("#toast")

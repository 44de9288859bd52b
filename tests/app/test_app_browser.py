"""The demo in a real browser: headless Chromium on the page, judged by the pixels that it shows.

Frames up to 128x128 go to the browser uncompressed, so what it shows must equal a run in Python exactly.
"""

from __future__ import annotations

import io
import time
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from streamvid.app.chromium import served
from streamvid.video_io import VideoReader

pytestmark = pytest.mark.browser
CURRENT = """() => { const c = streamvid.stage.screens[0].current;
  return {frame: c.frame, chunk: c.header.index, size: [c.picture.height, c.picture.width],
    data: [...c.picture.data]}; }"""
COUNTS = """() => { const s = streamvid.stage, screen = s.screens[0]; return {now: performance.now(),
  drawn: s.draws, passed: screen.shown, received: screen.shown + screen.queue.length, made: s.madeRate}; }"""


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


def photograph(page):
    """The stage as it is on the screen, ``[H, W, 3]``."""
    data = page.locator("#screens canvas").first.screenshot()
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def colours(picture):
    """Mean colours of the middle and of the corners."""
    height, width, _ = picture.shape
    middle = picture[height * 7 // 16 : height * 9 // 16, width * 7 // 16 : width * 9 // 16]
    corners = [picture[y, x] for y in (8, height - 8) for x in (8, width - 8)]
    return middle.mean(axis=(0, 1)), np.mean(corners, axis=0)


def test_frames_change_pause_stops_them_and_a_clip_is_saved(site, visit, tmp_path):
    page = visit("?prompt=red+ball&seed=3")
    after(page, 30)
    page.fill("#prompt", "blue cube")
    page.keyboard.press("Enter")
    page.wait_for_function("streamvid.page.latency", timeout=60000)
    page.click("#pause")
    frame, chunk, picture = current(page)
    page.wait_for_timeout(400)
    assert current(page)[0] == frame  # paused
    still = photograph(page)
    page.wait_for_timeout(300)
    assert np.array_equal(photograph(page), still)
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


def test_what_is_made_is_shown(visit, capsys):
    page = visit("?prompt=red+ball&seed=3")
    after(page, 24)
    best = {"share": 0.0, "rate": 0.0, "made": 0.0}
    for _ in range(4):  # another program may hold the machine for a second
        first = page.evaluate(COUNTS)
        page.wait_for_timeout(2500)
        last = page.evaluate(COUNTS)
        seconds = (last["now"] - first["now"]) / 1000
        drawn, received = last["drawn"] - first["drawn"], last["received"] - first["received"]
        found = {
            "share": drawn / max(1, last["passed"] - first["passed"]),
            "rate": drawn / seconds,
            "made": received / seconds,
        }
        best = max(best, found, key=lambda each: (each["share"] >= 0.9) * each["rate"])
        if best["share"] >= 0.9 and best["rate"] >= 20:
            break
    with capsys.disabled():
        print(
            f"\ndrawn {best['rate']:.1f} frames/s, {best['share']:.0%} of the frames due; {best['made']:.1f} frames/s "
            f"came, {last['made']:.0f} could be made"
        )
    assert best["share"] >= 0.9 and best["rate"] >= 20


def test_the_embedded_model_follows_a_prompt_and_a_killed_server_restarts_clean(open_page, capsys):
    ball, star = (
        "a big red ball sliding from side to side on a navy background",
        "a big yellow star spinning on a plum background",
    )
    with served() as (url, process):
        page = open_page(f"{url}?seed=4")
        page.fill("#prompt", ball)
        after(page, 24)
        _, corners = colours(photograph(page))
        assert corners[2] > corners[0] + 30  # navy
        page.fill("#prompt", star)
        page.keyboard.press("Enter")
        page.wait_for_function("streamvid.page.latency", timeout=60000)
        latency = page.evaluate("streamvid.page.latency")
        after(page, current(page)[0] + 36)
        middle, corners = colours(photograph(page))
        assert min(middle[:2]) > middle[2] + 60  # yellow
        assert corners[0] > corners[1] + 30 and corners[2] > corners[1] + 30  # plum
        with capsys.disabled():
            print(f"\nprompt to picture {latency:.0f} ms (embedded model)")
        process.kill()
        process.wait()
        page.wait_for_function(
            "document.getElementById('state').textContent === 'disconnected'", timeout=60000
        )
    port = int(url.rstrip("/").rsplit(":", 1)[1])
    with served(port=port) as (again, _):
        assert again == url
        page.wait_for_function("document.getElementById('state').textContent === 'live'", timeout=60000)
        page.wait_for_function("streamvid.stage.screens[0]?.current?.frame > 12", timeout=60000)
        middle, corners = colours(photograph(page))
        assert corners[0] > corners[1] + 30 and corners[2] > corners[1] + 30  # the prompt that was typed


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


def test_the_gradio_page_shows_the_stage_and_makes_a_clip(site, open_page):
    page = open_page(f"{site[0]}gradio/", width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    after(page, 12)
    assert not np.array_equal(current(page)[2], 0)
    page.get_by_role("tab", name="Clip").click()
    page.get_by_role("button", name="Make the clip").click()
    page.wait_for_selector("video[src]", timeout=120000)
    page.wait_for_function("document.querySelector('video').videoWidth === 64", timeout=60000)

"""Every control of the demo, used once in headless Chromium; a random model, and the embedded one for the picker."""

from __future__ import annotations

import json

import numpy as np
import pytest

from streamvid.video_io import VideoReader, VideoWriter

pytestmark = pytest.mark.browser
OUTSIDE = """() => [...document.querySelectorAll('#sv *')].filter((node) => {
  const box = node.getBoundingClientRect();
  const scrolled = node.closest('.film, .memory, .chips, .info');
  return box.width && !scrolled && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((node) => node.id || node.className || node.tagName)"""


def restarted(page, act):
    """Does something that begins the stream again, and waits for its first picture."""
    epoch = page.evaluate("streamvid.stage.epoch")
    act()
    page.wait_for_function(
        f"(streamvid.stage.epoch > {epoch} && streamvid.stage.screens[0]?.current) || "
        "!document.getElementById('toast').hidden",
        timeout=60000,
    )
    assert page.is_hidden("#toast"), page.inner_text("#toast")


def passed(page):
    """Frames/s that went over the stage in the next second, painted or not."""
    shown = "[performance.now() / 1000, streamvid.stage.screens[0].shown]"
    first = page.evaluate(shown)
    page.wait_for_timeout(1000)
    last = page.evaluate(shown)
    return (last[1] - first[1]) / (last[0] - first[0])


def receipt(page, words):
    page.wait_for_function(
        f"document.getElementById('receipt').textContent.includes({json.dumps(words)})", timeout=60000
    )


@pytest.fixture
def page(visit):
    page = visit("?prompt=red+ball")
    yield page
    assert page.is_hidden("#toast"), page.inner_text("#toast")


def test_prompt_controls(page):
    page.fill("#prompt", "blue cube")
    page.select_option("#transition", "blend")
    page.fill("#number", "2")
    page.click("#prompt-form .primary")
    receipt(page, "(blend:2)")
    page.fill("#at-frame", "600")
    page.select_option("#transition", "recache")
    page.click("#prompt-form .primary")
    receipt(page, "(recache)")
    page.fill("#at-frame", "")
    page.get_by_text("cut", exact=True).click()
    assert page.is_hidden("#transition") and page.is_hidden("#number")
    page.click("#prompt-form .primary")
    receipt(page, "(cut)")
    page.get_by_text("reset", exact=True).click()
    restarted(page, lambda: page.click("#prompt-form .primary"))


def test_transport_and_looks(page, tmp_path):
    restarted(page, lambda: page.click("#reset"))
    seed = page.input_value("#seed")
    restarted(page, lambda: page.click("#dice"))
    assert page.input_value("#seed") != seed
    page.fill("#seed", "5")
    restarted(page, lambda: page.locator("#seed").press("Tab"))
    assert page.evaluate("streamvid.page.running.seed") == 5
    page.select_option("#pace", "made")
    assert max(passed(page) for _ in range(5)) > 30  # faster than its 24 frames/s
    page.select_option("#pace", "native")
    page.select_option("#look", "crisp")
    page.select_option("#span", "5")
    page.wait_for_function("streamvid.stage.screens[0].current.frame > 130", timeout=60000)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "clip.mp4")
    with VideoReader(tmp_path / "clip.mp4") as reader:
        assert len(list(reader)) == 5 * 24
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    assert page.inner_text("#state") == "paused" and page.inner_text("#pause") == "Play"
    page.keyboard.press("Space")
    assert page.inner_text("#state") == "live"


def test_settings_compare_and_snapshots(page):
    page.select_option("#set-memory", "window")
    page.get_by_label("size", exact=True).fill("9")
    page.get_by_label("size", exact=True).press("Tab")
    page.select_option("#set-codec", "int4")
    unfit = page.locator("#set-step_cache option[value=teacache]")  # few-step sampling draws noise anew
    assert unfit.is_disabled() and "noise" in unfit.get_attribute("title")
    page.select_option("#set-step_cache", "motion")
    page.select_option("#set-attention", "reference")
    page.fill("#set-steps", "3")
    page.locator("#set-steps").press("Tab")
    page.wait_for_function(
        "document.getElementById('cost').textContent.includes('for 6 latent frames')", timeout=60000
    )
    restarted(page, lambda: page.click("#apply"))
    used = page.evaluate("streamvid.page.running")
    assert used["memory"].startswith("window:size=9") and used["codec"] == "int4" and used["steps"] == 3
    assert used["step_cache"] == "motion" and used["attention"] == "reference"
    page.wait_for_function(
        "document.getElementById('settings').textContent.includes('passes run')", timeout=60000
    )
    page.select_option("#set-codec", "none")
    restarted(page, lambda: page.click("#compare"))
    page.wait_for_function("streamvid.stage.screens[1]?.current", timeout=60000)
    assert "Int4" in page.inner_text("#screens figure:nth-child(1) figcaption")
    assert "Int4" not in page.inner_text("#screens figure:nth-child(2) figcaption")
    page.click("#snapshot")
    page.wait_for_selector("#snapshots figure")
    restarted(page, lambda: page.click("#apply"))
    restarted(page, lambda: page.click("#snapshots figure"))
    assert page.evaluate("streamvid.stage.screens.length") == 2  # the comparison is back
    page.wait_for_function("document.querySelectorAll('#film figure').length > 1", timeout=60000)
    assert page.locator("#memory > div").count() >= 1
    for plot in ("fps", "ms", "kv", "drift"):
        assert page.locator(f"#legend-{plot} i").count() >= 1


def test_the_memory_of_each_group_of_heads_is_drawn(page):
    page.select_option("#set-memory", "forcing_kv")
    restarted(page, lambda: page.click("#apply"))
    page.wait_for_selector("#memory div ~ small:has-text('group 1') ~ div canvas", timeout=60000)
    assert page.locator("#memory small").count() == 2


def test_timeline_is_saved_and_loaded(page, tmp_path):
    page.fill("#prompt", "blue cube")
    page.click("#prompt-form .primary")
    receipt(page, "blue cube")
    page.click("summary:has-text('Timeline')")
    page.wait_for_function("document.querySelectorAll('#timeline li').length === 2", timeout=60000)
    with page.expect_download() as download:
        page.click("#timeline-save")
    path = tmp_path / "timeline.json"
    download.value.save_as(path)
    saved = json.loads(path.read_text())
    assert saved["prompts"][0]["prompt"] == "blue cube" and saved["settings"]["prompt"] == "red ball"
    saved["settings"]["seed"] = 77
    path.write_text(json.dumps(saved))
    restarted(page, lambda: page.set_input_files("#timeline-load", path))
    page.wait_for_function("document.querySelectorAll('#timeline li').length === 2", timeout=60000)
    assert page.input_value("#seed") == "77"


def test_a_clip_and_the_webcam_begin_a_stream(page, tmp_path):
    with VideoWriter(tmp_path / "clip.mp4", fps=8) as writer:
        for level in range(9):
            writer.add(np.full((64, 64, 3), 20 * level, np.uint8))
    page.click("summary:has-text('Start from')")
    restarted(page, lambda: page.set_input_files("#begin", tmp_path / "clip.mp4"))
    restarted(page, lambda: page.click("#webcam"))


def test_another_model_is_looked_at_and_loaded(page):
    page.click("summary:has-text('Model')")
    page.fill("#path", "tiny")
    page.click("#info-form button")
    page.wait_for_function(
        "document.getElementById('info').textContent.includes('parameters')", timeout=60000
    )
    restarted(page, lambda: page.click("#choose"))
    assert "tiny" in page.inner_text("#model")
    assert page.locator("#examples button").count() >= 5
    page.locator("#examples button").nth(1).click()
    receipt(page, "star")


def test_nothing_sticks_out_of_a_phone(visit):
    page = visit("?prompt=red+ball", width=390, height=844)
    for name in ("Timeline", "Start from", "Model"):
        page.click(f"summary:has-text('{name}')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(OUTSIDE) == []

"""A server with a random model and a headless Chromium for the browser tests."""

from __future__ import annotations

import pytest
import tiny_random
from app_driver import running

import streamvid
from streamvid.app.chromium import FLAGS, MOVING, find_chromium
from streamvid.app.hub import Hub

FPS = 24.0
CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A running server of a random model that is made much faster than it is shown: (address, hub, pipeline)."""
    pytest.importorskip("uvicorn")
    from streamvid.app.server import build

    folder = tiny_random.save_folder(tmp_path_factory.mktemp("models") / "fast", config={"fps": FPS})
    pipe = streamvid.load(folder, device="cpu", max_streams=8)
    hub = Hub("random", lambda name: pipe if name == "random" else streamvid.load(name, device="cpu"))
    with running(build(hub)) as url:
        yield url, hub, pipe


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = find_chromium()
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS + CAMERA)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens an address and waits for its first picture; a page that fails, or asks another machine, fails the test."""
    pages, troubles = [], []

    def opened(url, width=900, height=700):
        page = browser.new_page(bypass_csp=True, viewport={"width": width, "height": height})
        page.on("pageerror", lambda error: troubles.append(f"the page failed: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("http://127.0.0.1:", "blob:", "data:"))
                or troubles.append(f"asked {request.url}")
            ),
        )
        page.goto(url, timeout=120000)  # on a busy machine the first Gradio page takes half a minute
        page.wait_for_function(MOVING, timeout=60000)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.is_closed() or page.close()
    assert troubles == []


@pytest.fixture
def visit(site, open_page):
    """Opens a tab of ``site`` with a query."""
    return lambda query, **size: open_page(site[0] + query, **size)

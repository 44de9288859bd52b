"""The demo as its users have it, for measurements, pictures and tests: a server process and a headless Chromium.

Needs Playwright's Python package and the system's Chromium; nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamvid.errors import StreamvidError

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
MOVING = "window.streamvid?.stage.screens[0]?.current"
"""True in the page once the first frame is on the screen."""


def find_chromium() -> str | None:
    """Path of the system's Chromium, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser (Playwright's). Raises StreamvidError when one of the two is missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise StreamvidError("this needs Playwright's Python package; run: pip install playwright") from None
    path = find_chromium()
    if path is None:
        raise StreamvidError(
            "this needs Chromium; install it with your package manager (apt-get install chromium)"
        )
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(*arguments: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen]]:
    """``streamvid app`` in a process of its own, as its address and the process; ended with the block."""
    command = [sys.executable, "-m", "streamvid.cli", "app", "--no-browser", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http" not in line:
            raise StreamvidError(f"the server did not start: {line.strip() or 'it said nothing'}")
        yield line.split()[3], process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout and process.stdout.close()

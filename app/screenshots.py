"""``python -m streamvid.app.screenshots docs/images``: the pictures of the demo in the README.

A stream of the embedded model runs and its prompt changes; then the page is photographed at two sizes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

from streamvid.app.chromium import MOVING, chromium, served

SIZES = {"app_desktop": (1440, 900, 1), "app_phone": (390, 844, 2)}
"""Width and height of the window, and device pixels a pixel."""
FIRST = "a big red ball sliding from side to side on a navy background"
SECOND = "a big yellow star spinning on a plum background"
CHANGE, SHOT = 90, 245
"""Frame numbers from which the prompt is changed and the picture is taken."""


def main(folder: Path) -> None:
    """Write ``app_desktop.png`` and ``app_phone.png`` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with served() as (url, _), chromium() as browser:
        for name, (width, height, ratio) in SIZES.items():
            page = browser.new_page(
                bypass_csp=True, viewport={"width": width, "height": height}, device_scale_factor=ratio
            )
            page.goto(f"{url}?seed=4&prompt={quote(FIRST)}")
            page.wait_for_function(MOVING, timeout=120_000)
            page.wait_for_function(f"streamvid.stage.screens[0].current.frame > {CHANGE}", timeout=120_000)
            page.fill("#prompt", SECOND)
            page.click("#prompt-form .primary")
            page.click("#snapshot")
            page.evaluate("window.scrollTo(0, 0)")
            page.wait_for_function(f"streamvid.stage.screens[0].current.frame > {SHOT}", timeout=120_000)
            page.screenshot(path=folder / f"{name}.png")
            page.close()
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))

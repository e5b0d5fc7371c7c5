"""Pictures of the page of ``fusco explore`` for the documentation: PNG files of single views, made in a browser.

``python tools/pictures.py FOLDER`` needs playwright and a browser (``FUSCO_BROWSER``, or one of ``BROWSERS``).
Pictures are of the plan of a prefill on 8 nodes of 8 ranks, in the fonts of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
PLAN = ("--traffic", "one-prompt", "--tokens", "8192")
VIEWS = ("links", "traffic", "experts", "replay")
MAX_BYTES = 200_000


def find_browser() -> str | None:
    """Return the path of a browser that playwright can drive, or None."""
    return os.environ.get("FUSCO_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


def main(folder: Path) -> None:
    """Write ``explore-VIEW.png`` for each view, and the head of the page in the dark, ``explore-dark.png``."""
    path = find_browser()
    if path is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)}, and FUSCO_BROWSER is not set")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page = Path(made, "plan.html")
        command = [sys.executable, "-m", "fusco", "explore", "--out", str(page), *PLAN]
        subprocess.run(command, check=True, timeout=300)  # noqa: S603  the arguments are those above
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        light = _opened(browser, page, "light", 1600)
        for view in VIEWS:
            light.locator(f"#{view}").screenshot(path=folder / f"explore-{view}.png")
        _opened(browser, page, "dark", 900).screenshot(path=folder / "explore-dark.png")
        browser.close()
    for picture in sorted(folder.glob("explore-*.png")):
        size = picture.stat().st_size
        print(f"{picture}: {size / 1e3:.0f} KB")  # noqa: T201
        if size > MAX_BYTES:
            raise SystemExit(f"{picture} has {size:,} bytes, more than {MAX_BYTES:,}")


def _opened(browser: Any, page: Path, scheme: str, height: int) -> Any:
    context = browser.new_context(
        viewport={"width": 1120, "height": height}, color_scheme=scheme, offline=True, device_scale_factor=1.25
    )
    opened = context.new_page()
    opened.goto(page.as_uri())
    return opened


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A browser for the tests of pages.

It needs the package playwright, and a browser: ``FUSCO_BROWSER``, chromium-headless-shell, chromium or google-chrome.
Without them tests are skipped; in CI (``CI=true``) they fail.
"""

from __future__ import annotations

import os
import shutil

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def lacking(reason):
    """Skip, but fail in CI, which must have a browser."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI runs these tests: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser():
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415  it is optional
    except ImportError:
        lacking("playwright is not installed")
    path = os.environ.get("FUSCO_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        lacking(f"there is no browser: none of {', '.join(BROWSERS)}, and FUSCO_BROWSER is not set")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()

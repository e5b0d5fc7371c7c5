"""The documentation site, built strictly, in Chromium: no error, no request elsewhere, search, narrow pages."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built with fusco[docs]")

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("", "start/communication/", "start/cluster/", "frameworks/", "performance/cuda/", "api/fusco/", "design/")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, served on the loopback interface."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def page(browser, site, request):
    """A narrow page, light or dark as the test asks, whose errors and requests are kept."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=request.param)
    page = context.new_page()
    page.errors, page.requests = [], []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda asked: page.requests.append(asked.url))
    yield page
    context.close()


@pytest.mark.parametrize("page", ["light"], indirect=True)
def test_pages_have_no_errors_ask_nobody_else_and_fit_a_narrow_window(page, site):
    for path in PAGES:
        page.goto(site + path)
        assert page.title().endswith("fusco")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((site, "data:", "blob:"))] == []
    assert len(page.requests) > len(PAGES)


@pytest.mark.parametrize("page", ["dark"], indirect=True)
def test_the_search_finds_dispatch(page, site):
    page.goto(site)
    page.locator("label[for=__search]").first.click()
    box, deadline = page.locator("input.md-search__input"), time.monotonic() + 30.0
    while not page.locator(".md-search-result__item a").first.is_visible():
        assert time.monotonic() < deadline
        box.fill("")  # what is typed before the index has come is lost
        box.press_sequentially("dispatch")
        page.wait_for_timeout(500)
    assert page.locator(".md-search-result__item").count() > 3
    assert "api/fusco" in "".join(
        each.get_attribute("href") for each in page.locator(".md-search-result__item a").all()
    )
    assert page.errors == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "data").glob("*.jsonl")), ids=lambda path: path.stem)
def test_data_says_where_it_is_from(path):
    head, *records = map(json.loads, path.read_text().splitlines())
    assert set(head) == {"source", "date", "commit", "hardware"}
    assert records
    assert len(set(map(frozenset, records))) <= 2  # such as what was measured and what was refused
    assert next(iter(records[0])) in set.intersection(*map(set, records))


def test_every_picture_is_drawn_from_data_and_kept(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/figures.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert {"words-dispatch.svg", "time-over-tokens.svg", "cost-over-nodes.svg"} <= drawn
    assert drawn <= {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    shown = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [name for name in sorted(drawn) if name not in shown] == []

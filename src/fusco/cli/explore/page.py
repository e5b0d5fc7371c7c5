"""The page: views as JSON between HTML, style and scripts, in one file that loads nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from fusco.cli.explore.views import View
from fusco.core.files import written_beside

# In this order, in one script: what all views share, the views, and what puts them on the page.
STYLES = ("page.css", "views.css")
SCRIPTS = (
    "base.js",
    "drawing.js",
    "matrix.js",
    "loads.js",
    "experts.js",
    "time.js",
    "replay.js",
    "sweep.js",
    "results.js",
    "page.js",
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: what the page is about, its heading. subtitle: more of it, in a sentence, or empty.
        facts: short texts by label, such as the number of ranks.
        views: what is shown, in this order.
        origin: where the numbers come from, in a sentence at the end.
    """

    title: str
    subtitle: str
    facts: Mapping[str, str]
    views: Sequence[View]
    origin: str

    def to_html(self) -> str:
        """Return the whole file. ``ValueError`` without a view, or for a number that JSON lacks (NaN)."""
        if not self.views:
            raise ValueError(f"there is nothing to show of {self.title}")
        data = {
            "title": self.title,
            "subtitle": self.subtitle,
            "facts": dict(self.facts),
            "origin": self.origin,
            "views": [asdict(view) for view in self.views],
        }
        # Within a script element only "</script" and "<!--" end or change it.
        text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        parts = {
            "TITLE": html.escape(self.title),
            "STYLE": "\n".join(map(_asset, STYLES)),
            "DATA": text,
            "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        }
        return re.sub("%([A-Z]+)%", lambda place: parts[place[1]], _asset("page.html"))


def write_page(page: Page, path: Path) -> None:
    """Write the page; the file is complete or invisible."""
    text = page.to_html()
    with written_beside(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _asset(name: str) -> str:
    return resources.files("fusco.cli.explore").joinpath("assets").joinpath(name).read_text(encoding="utf-8")

"""What the documentation site needs beyond MkDocs: links to files beside the pages, and doctests in docstrings.

MkDocs loads the module as a hook, Griffe (which reads the sources for the API pages) as an extension.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> (?:.|\n(?!\n|\Z))*", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page whose links to files outside ``docs`` lead to the repository; without its address they are text."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, link))
        if link.startswith("#") or path.startswith("docs/"):
            return match[0]
        return f"{mark}[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return LINK.sub(replace, markdown)


class Doctests(griffe.Extension):
    """Turn the doctests of docstrings into code blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the text of an object's docstring; Griffe calls this for each object it has read."""
        if obj.docstring is not None:
            text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = DOCTEST.sub(lambda example: f"```pycon\n{example[0]}\n```", text)

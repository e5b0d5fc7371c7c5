"""Commands and code of README and pages: blocks in fences with a language; indented blocks are commands.

``<!-- fragment: why -->`` above a block says that nothing runs it.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_MARK = re.compile(r"<!-- fragment: .+ -->\n+\Z")
_TAB = re.compile(r'^=== ".+"\n((?:\n| {4}.*\n)*)', re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A block of a page. ``language`` is that of its fence; an indented block has ``commands``."""

    language: str
    text: str
    is_fragment: bool


def snippets_of(page: str) -> list[Snippet]:
    """Return the blocks of a page (its path in the repository), in order."""
    return _snippets((PAGES[page]).read_text())


def python_of(page: str) -> list[str]:
    """Return the Python blocks of a page that run, but the sessions (``>>>``), which doctest runs."""
    found = [each for each in snippets_of(page) if each.language == "python" and not each.is_fragment]
    return [each.text for each in found if not each.text.startswith(">>>")]


def _snippets(text: str) -> list[Snippet]:
    text = _TAB.sub(lambda tab: textwrap.dedent(tab[1]), text)
    found = [(match.start(), match[2], textwrap.dedent(match[3])) for match in _FENCE.finditer(text)]
    outside = _FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)  # as long, and not indented
    found += [(match.start(), "commands", textwrap.dedent(match[0])) for match in _INDENTED.finditer(outside)]
    return [Snippet(kind, body, bool(_MARK.search(text[:start]))) for start, kind, body in sorted(found)]

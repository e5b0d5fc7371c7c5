"""Documentation agrees with the repository: links, headings, paths, modules, layers, glossary, API reference."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fusco

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = (ROOT, ROOT / "src" / "fusco")  # pages shorten src/fusco/control/flags.py to control/flags.py
PLACEHOLDER = "NAME"  # in cuda/kernels/NAME.py


def test_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md", "docs/api.md", "docs/performance/cuda.md"} <= set(IDS)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_named_paths_and_modules_exist(page):
    text = page.read_text()
    missing = [path for path in named_paths(text) if not any((folder / path).exists() for folder in FOLDERS)]
    missing += [name for name in named_modules(text) if not is_importable(name)]
    assert missing == []


def test_the_version_is_the_same_everywhere():
    latest = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert latest == fusco.__version__


def test_sizes_on_the_page_are_those_that_fusco_prints():
    outcome = doctest.testfile(str(ROOT / "docs" / "coming_from.md"), module_relative=False)
    assert (outcome.failed, outcome.attempted) == (0, 4)


def test_design_lists_the_layers_of_the_package():
    assert fusco.__doc__
    listing = fusco.__doc__.split("::\n", 1)[1].split("\n\nImporting", 1)[0]
    of_package = [re.split(r"\s{3,}", line.strip())[0].split() for line in listing.splitlines() if line.strip()]
    section = (ROOT / "docs" / "design.md").read_text().split("## Layers\n", 1)[1]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == of_package


def test_every_word_of_the_glossary_is_used():
    text = (ROOT / "docs" / "design.md").read_text()
    before, rest = text.split("## Glossary\n", 1)
    table, after = rest.split("\n## ", 1)
    words = re.findall(r"^\| ([a-z][\w \-]*) \|", table, re.MULTILINE)[1:]
    others = " ".join([before, after, *(page.read_text() for page in PAGES if page.name != "design.md")]).lower()
    assert len(words) > 30
    assert len(set(words)) == len(words)
    assert [word for word in words if not re.search(rf"\b{word}", re.sub(r"\s+", " ", others))] == []


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    """The module that writes docs/api.md, which is in no package."""
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_api_reference_is_up_to_date(reference):
    assert reference.page() == (ROOT / "docs" / "api.md").read_text(), "run `make docs`"


def test_the_api_reference_has_every_public_name(reference):
    modules = {"fsdp", "offload", "placement", "rails", "schedule"}
    assert set(reference.exports("fusco")) | modules | {"__version__"} == set(fusco.__all__)
    text = (ROOT / "docs" / "api.md").read_text()
    headings = re.findall(r"^#{2,4} `?([\w.]+)`?$", text, re.MULTILINE)
    assert {"fusco.fsdp", "fusco.schedule"} <= set(headings)
    for package in reference.TOPICS:
        assert set(reference.exports(package)) <= set(headings)
    assert [name for name in headings if headings.count(name) > 1] == []
    every_heading = [heading.strip("`").lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    assert len(set(every_heading)) == len(every_heading)  # else links lead to the first of two


def test_every_public_name_has_a_docstring(reference):
    found = [
        entry
        for package in reference.TOPICS
        for name, module in reference.exports(package).items()
        for entry in reference.entries(name, reference.source_of(module))
    ]
    assert len(found) > 100
    assert [entry.name for entry in found if not entry.doc.strip()] == []


def test_names_without_a_topic_are_an_error(reference, monkeypatch):
    monkeypatch.setitem(reference.TOPICS["fusco.schedule"], "Between nodes", "decompose Stages spread_out nothing")
    with pytest.raises(ValueError, match=re.escape("fusco.schedule differ: ['lower_bound_bytes', 'nothing']")):
        reference.page()


def test_entries_of_a_class_are_its_fields_properties_and_public_methods(reference):
    source = '''
@dataclass(frozen=True)
class Pair:
    """Two values."""

    first: Annotated[
        int, 1  # noqa: A003
    ]
    second: int = 2

    @property
    def total(self) -> int:
        """Their sum,
        as an int."""

    @classmethod
    def of(
        cls, value: int
    ) -> Pair:
        """Twice the same."""

    def _hidden(self): ...
'''
    pair, method = reference.entries("Pair", source)
    fields = "    first: Annotated[\n        int, 1\n    ]\n    second: int = 2"
    assert pair.code == f"@dataclass(frozen=True)\nclass Pair:\n{fields}"
    assert reference.markdown(pair.doc) == "Two values.\n\n**Properties**\n\n- `total`: Their sum,\n  as an int."
    assert method == ("Pair.of", "@classmethod\ndef of(\n    cls, value: int\n) -> Pair", "Twice the same.")


def test_entries_of_functions_and_constants(reference):
    source = "# Not this.\n\n# The kinds,\n# by name.\nKINDS: dict = {\n    1: 2,  # noqa: X\n}\ndef f(a=1): ...\n"
    assert list(reference.entries("KINDS", source)) == [
        ("KINDS", "KINDS: dict = {\n    1: 2,\n}", "The kinds,\nby name.")
    ]
    assert list(reference.entries("f", source)) == [("f", "def f(a=1)", "")]


def test_docstrings_become_markdown(reference):
    sections = "Args:\n    x, y: rows\n        of ints.\n\nReturns:\n    A sum."
    doc = f"Do ``this``::\n\n    code\n\n{sections}\n\n>>> f(1)\n1\n\nEnd."
    assert reference.markdown(doc) == (
        "Do `this`:\n\n    code\n\n**Arguments**\n\n- `x, y`: rows\n  of ints.\n\n**Returns**\n\nA sum.\n\n"
        "```pycon\n>>> f(1)\n1\n```\n\nEnd."
    )


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A, b\n[a](#a-b) [b](#c) [c](page.md#a-b) [d](page.md#d) [e](none.md) [f](https://x.y/z)\n")
    assert broken_links(page) == ["#c", "page.md#d", "none.md"]


def test_paths_and_modules_are_recognised():
    text = "`src/a/b.py` `control/flags.py:3` `api/`, `kernels/NAME.py` `a / b` `fusco.core.rows` `fusco train` `x.py`"
    assert list(named_paths(text)) == ["src/a/b.py", "control/flags.py", "api/"]
    assert list(named_modules(text)) == ["fusco.core.rows"]
    assert is_importable("fusco.core.rows.row_bytes")
    assert is_importable("fusco.core.topology")
    assert not is_importable("fusco.core.nothing")
    assert not is_importable("fusco.nothing.at_all")


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [link for link in links if not re.match(r"\w+:", link) and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a relative link leads to a file and, after ``#``, to one of its headings."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def named_paths(text: str) -> Iterator[str]:
    """Yield the paths in backticks: those that end in ``/`` or have a folder and a suffix."""
    for code in re.findall(r"`([^`\n]+)`", text):
        path = re.sub(r":\d+$", "", code)
        is_path = re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*/|([\w.\-]+/)+[\w\-]+\.\w+", path)
        if is_path and PLACEHOLDER not in path:
            yield path


def named_modules(text: str) -> Iterator[str]:
    """Yield the dotted names of fusco in backticks, without arguments of calls."""
    for code in re.findall(r"`([^`\n]+)`", text):
        if name := re.fullmatch(r"(fusco(?:\.\w+)+)(?:\(.*\))?", code):
            yield name[1]


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    thing: object = fusco
    for number, part in enumerate(name.split(".")[1:], start=2):
        try:
            thing = importlib.import_module(".".join(name.split(".")[:number]))
        except ModuleNotFoundError:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
    return True

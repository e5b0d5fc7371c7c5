"""Documentation agrees with the repository: links, headings, paths, modules, layers, glossary, API reference."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusco

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = (ROOT, ROOT / "src" / "fusco")  # pages shorten src/fusco/control/flags.py to control/flags.py
PLACEHOLDER = "NAME"  # in cuda/kernels/NAME.py


def test_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md", "docs/api/fusco.md", "docs/performance/cuda.md"} <= set(
        IDS
    )


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
    assert f"\nversion: {fusco.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version = "{fusco.__version__}"' in (ROOT / "conda" / "meta.yaml").read_text()


@pytest.mark.parametrize(("page", "examples"), [("coming_from.md", 4), ("extending.md", 7)])
def test_sessions_on_pages_print_what_python_prints(page, examples):
    outcome = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert (outcome.failed, outcome.attempted) == (0, examples)


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


def test_the_api_reference_has_every_public_name_once():
    modules = {"fsdp", "offload", "placement", "rails", "schedule"}
    assert exports("fusco") | modules | {"__version__"} == set(fusco.__all__)
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    assert len(pages) == len(modules) + 2
    for page in pages:
        package = "fusco" if page.stem == "fusco" else f"fusco.{page.stem}"
        listed = [name for name in documented(page) if name != package]
        assert sorted(listed) == sorted(f"{package}.{name}" for name in exports(package)), page


def test_every_public_name_has_a_docstring():
    found, missing = 0, []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in documented(page):
            thing = pkgutil.resolve_name(name)
            members = [
                (f"{name}.{attribute}", getattr(thing, attribute))
                for attribute in (dir(thing) if inspect.isclass(thing) else ())
                if not attribute.startswith("_")
                and "fusco" in str(getattr(getattr(thing, attribute), "__module__", ""))
            ]
            for each, value in [(name, thing), *members]:
                is_described = inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property)
                found += is_described
                missing += [each] if is_described and not (inspect.getdoc(value) or "").strip() else []
    assert found > 250
    assert missing == []


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
    is_api = anchor.startswith("fusco.") and any(anchor.startswith(name) for name in documented(target))
    return target.exists() and (not anchor or is_api or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def documented(page: Path) -> list[str]:
    """Return the names that a page of the API reference documents."""
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)


def exports(package: str) -> set[str]:
    """Return public names of a package: those that its stub or ``__init__.py`` imports as themselves, no modules."""
    folder = ROOT.joinpath("src", *package.split("."))
    path = folder / ("__init__.pyi" if (folder / "__init__.pyi").exists() else "__init__.py")
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    unlisted = ("fusco", "fusco.core.version")
    return {a.name for node in imports for a in node.names if a.asname == a.name and node.module not in unlisted}


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

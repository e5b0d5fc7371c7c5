"""Imports go downwards, importing fusco costs nothing, and every public name is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fusco
from fusco.core.requirements import LEAST_OF_FSDP, installed, is_recent

PACKAGE = Path(fusco.__file__).parent


def layers() -> list[list[str]]:
    """The layers that the package's docstring lists, the highest first."""
    assert fusco.__doc__
    listing = fusco.__doc__.split("::\n", 1)[1].split("\n\nImporting", 1)[0]
    return [re.split(r"\s{3,}", line.strip())[0].split() for line in listing.splitlines() if line.strip()]


def imported_parts(tree: ast.Module) -> set[str]:
    """The names after ``fusco.`` of everything that a module imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "fusco":
                names |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("fusco."):
                names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fusco.")}
    return names


@cache
def part_to_imports() -> dict[str, set[str]]:
    """What each part of the package (a module or subpackage right below it) imports from the other parts.

    ``__init__`` only hands names on, and ``__main__`` is the command line by another name.
    """
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__"):
            imports.setdefault(part, set()).update(imported_parts(ast.parse(path.read_text())))
    return {part: names - {part} for part, names in imports.items()}


def test_every_part_has_its_layer():
    listed = [part for layer in layers() for part in layer]
    assert len(listed) == len(set(listed))
    assert set(part_to_imports()) <= set(listed)


def test_no_part_imports_from_a_layer_above_its_own():
    height = {part: -i for i, layer in enumerate(layers()) for part in layer}
    upwards = {
        f"{part} imports {name}"
        for part, names in part_to_imports().items()
        for name in names
        if height[name] > height[part]
    }
    assert not upwards


def test_no_two_parts_import_each_other():
    tuple(TopologicalSorter(part_to_imports()).static_order())  # raises CycleError


def test_neither_backend_imports_the_other():
    imports = part_to_imports()
    assert "cuda" not in imports["cpu"]
    assert "cpu" not in imports["cuda"]


def test_the_simulator_is_pure_and_only_commands_and_benchmarks_import_it():
    imports = part_to_imports()
    assert imports["simulate"] <= {"planner", "placement", "schedule", "core"}
    assert {part for part, names in imports.items() if "simulate" in names} <= {"cli", "bench"}


def test_nothing_lies_loose_at_the_top():
    loose = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import fusco; dir(fusco); fusco.__version__", {"torch", "numpy", "numba"}),
        ("import fusco.rails, fusco.testbed", {"torch", "numba"}),
        ("import fusco.schedule", {"torch"}),
    ],
)
def test_importing_loads_nothing_heavy_that_is_not_needed(statement, heavy):
    script = f"{statement}; import sys; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_public_name_is_there():
    for name in fusco.__all__:
        if name != "fsdp" or is_recent(installed("torch"), LEAST_OF_FSDP["torch"]):
            assert getattr(fusco, name) is not None
    assert sorted(fusco.__all__) == dir(fusco)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fusco.nothing  # noqa: B018


def test_test_files_have_names_of_their_own():
    """Pytest imports them by these names, so that all can be collected together."""
    tests = Path(__file__).parents[1]
    counts = Counter(path.name for path in tests.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []

"""Pages of reference are whole: every variable of the environment, every field that a command writes as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re

import pytest
from command_line import ROOT, run
from test_help import COMMANDS

import fusco.bench
from fusco.bench.harness.environment import Measurement

ENVIRONMENT, JSON = (ROOT / "docs" / "reference" / page for page in ("environment.md", "json.md"))
SOURCES = [*(ROOT / "src").rglob("*.*"), *(ROOT / "tools").glob("*.py"), ROOT / "Makefile", ROOT / "hatch_build.py"]
SECTIONS = {  # commands to the dataclasses of the records that the page lists for them
    name: re.findall(r"^::: (\S+)$", section, re.MULTILINE)
    for names, section in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", JSON.read_text(), re.MULTILINE)
    for name in names.split(", ")
}


def test_every_variable_that_fusco_reads_is_on_the_page():
    read = {
        name
        for path in SOURCES
        if path.suffix in {".py", ".c", ".h", ".cu", ".cuh"} or path.name == "Makefile"
        for name in re.findall(r"\bFUSCO_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    told = set(re.findall(r"`(FUSCO_[A-Z_]+)`", ENVIRONMENT.read_text()))
    assert told == read


def kind_of(name):
    return pkgutil.resolve_name(name)


def test_every_command_that_writes_json_has_a_section():
    writing = {name for name, command in COMMANDS.items() if any(each.name == "json" for each in command.params)}
    assert {name for name in SECTIONS if name != "All measurements"} == writing
    assert [name for name in writing if not SECTIONS[name]] == []


def test_every_record_of_a_measurement_is_listed():
    for module in pkgutil.walk_packages(fusco.bench.__path__, "fusco.bench."):
        importlib.import_module(module.name)
    kinds, waiting = set(), [Measurement]
    while waiting:
        waiting += (below := waiting.pop().__subclasses__())
        kinds |= set(below)
    listed = {kind_of(name) for names in SECTIONS.values() for name in names}
    assert {kind.__name__ for kind in kinds if kind.__module__.startswith("fusco.")} <= {one.__name__ for one in listed}


def require_fields(line, out):
    """Require that the lines of JSON of a command have the fields of the page."""
    name = next(name for name in COMMANDS if line.startswith(name))
    fields = [{each.name for each in dataclasses.fields(kind_of(kind))} for kind in SECTIONS[name]]
    lines = out.read_text().splitlines() if out.exists() else []
    assert lines or name == "rails"
    assert [found for each in lines if (found := set(json.loads(each))) not in fields] == []


@pytest.mark.parametrize("line", ["plan --shuffle zipf", "bench balance --ranks 8"])
def test_lines_have_the_fields_of_the_page(line, tmp_path):
    """Of other commands ``test_screens`` looks at them."""
    out = tmp_path / "out.jsonl"
    done = run(*line.split(), "--json", str(out))
    assert done.exit_code == 0, done.output
    require_fields(line, out)

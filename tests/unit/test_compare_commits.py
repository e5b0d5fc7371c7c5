"""The tool that compares two commits: which times it takes of records, and what its table shows of them."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    return importlib.import_module("compare_commits")


def test_times_are_compared_by_case(tool):
    def records(factor):
        of_run = {"versions": {"torch": "2"}, "commit": str(factor), "hidden": 8, "errors": []}
        exact = {"variant": "exact", "pair_us": 4.0 * factor, "step_us": {"rest": 1.0}, "idle_ms": None}
        return [{**of_run, **exact}, {**of_run, "variant": "static", "pair_us": 3.0 * factor, "total_ms": 0.0}]

    lines = tool.summarize(tool.times_of(records(1)), tool.times_of(records(2))).splitlines()
    assert lines[2:] == [
        "| variant=exact | pair_us | 4.00 | 8.00 | 2.000 |",
        "| variant=static | pair_us | 3.00 | 6.00 | 2.000 |",
    ]


def test_a_case_that_one_commit_lacks_is_left_out(tool):
    old, new = ({"variant": name, "total_ms": 2.0} for name in ("fusco", "fusco-graph"))
    assert len(tool.summarize(tool.times_of([old]), tool.times_of([old, new])).splitlines()) == 3
    assert len(tool.summarize(tool.times_of([old]), tool.times_of([new])).splitlines()) == 2

"""Help and tables of the command line: fast, complete, and as wide as the terminal."""

import os
import re
import subprocess
import sys
from typing import get_args

import pytest
from command_line import run

import fusco
from fusco.bench.shuffle.variants import choose_variants
from fusco.cli.options import BalancerName, choose_names
from fusco.planner.balancer import BALANCERS


def test_help_answers_in_three_times_what_its_libraries_need():
    """Seconds of a core, 0.2 on an idle AMD EPYC and 0.6 on the same at worse times; PyTorch would take 2 to 4."""

    def seconds(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    libraries = "import importlib.metadata, typer, rich.console, rich.table, rich.progress"
    times = [(seconds("-m", "fusco", "--help"), seconds("-c", libraries)) for _ in range(5)]
    best_s, libraries_s = map(min, zip(*times, strict=True))
    assert best_s < 3 * libraries_s


def test_option_names_are_those_of_the_library():
    assert list(get_args(BalancerName)) == list(BALANCERS)


def test_names_come_with_commas_or_repeated():
    assert choose_names(["fusco, baseline", "fusco", "no-engine"], [], "variants") == ["fusco", "baseline", "no-engine"]
    assert choose_names(None, ["a", "b"], "letters") == ["a", "b"]


def test_the_version_is_told():
    assert run("--version").output == f"fusco {fusco.__version__}\n"


def test_help_lists_the_usual_variants():
    output = "".join(run("bench", "shuffle", "--help").output.replace("│", " ").split())
    assert f"Default:fusco,baseline;onCUDA{','.join(choose_variants('cuda', 1))},between" in output


def test_tables_are_as_wide_as_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = run("doctor").stdout.splitlines()
    assert max(map(len, lines)) == 70
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, run("doctor").stdout.splitlines())) > 120


@pytest.mark.parametrize("command", [["bench", "shuffle"], ["train"], ["bench", "schedule"], ["schedule"]])
def test_help_is_wrapped_once(command):
    variables = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "fusco", *command, "--help"], env=variables, capture_output=True, text=True, check=True
    )
    text = done.stdout.split("[OPTIONS]")[1].split("╭")[0]
    for paragraph in re.split(r"\n\s*\n", text):
        *full, _ = paragraph.strip("\n").splitlines() or [""]
        for line, after in zip(full, paragraph.strip("\n").splitlines()[1:], strict=True):
            assert len(f"{line.rstrip()} {after.split()[0]}") > 79, f"the line ends early: {line!r}"

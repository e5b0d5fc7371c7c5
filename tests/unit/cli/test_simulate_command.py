"""``fusco simulate``: a run, sweeps, files, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fusco.bench import names
from fusco.cli.main import app
from fusco.simulate import systems

SMALL = ("--cluster", "h100x8", "--ranks-per-node", "2", "--tokens", "64", "--hidden", "128")


def run(*arguments):
    return CliRunner().invoke(app, ("simulate", *arguments), env={"COLUMNS": "160"})


def test_the_names_of_systems_are_known():
    assert tuple(systems.SYSTEMS) == names.SYSTEMS


def test_a_run_says_what_binds_and_what_parts_bring(tmp_path):
    out, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    done = run(*SMALL, "--nodes", "2", "--traffic", "trace", "--json", str(out), "--timeline", str(trace))
    assert done.exit_code == 0, done.output
    assert "what binds dispatch of fusco: " in done.output
    assert "not given for h100x8, so defaults: pair_gbs 0" in done.output
    assert "deduplication" in done.output
    assert "break-even" in done.output
    wrote = [f"wrote {path}, {path.stat().st_size / 1e3:.1f} kB" for path in (trace, out)]
    assert done.output.splitlines()[-3:-1] == wrote  # before the finding
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["system"], record["call"]) for record in records[:2]] == [
        ("fusco", "dispatch"),
        ("fusco", "combine"),
    ]
    assert all(record["kind"] == "simulation" and record["tier"] == "fluid" for record in records)
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2, 3}


def test_a_sweep_has_a_line_for_each_size(tmp_path):
    out = tmp_path / "out.jsonl"
    sweep = ("--nodes", "2,4", "--sweep-tokens", "16,64", "--systems", "fusco,nccl", "--traffic", "uniform")
    done = run(*SMALL, *sweep, "--json", str(out))
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(record["nodes"], record["tokens"]) for record in records} == {(2, 64), (2, 256), (4, 128), (4, 512)}


def test_a_sweep_over_skew_is_slower_where_experts_are_less_even(tmp_path):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    sweep = ("--nodes", "2", "--systems", "nccl", "--traffic", "zipf", "--sweep-skew", "0,0.5,1.5")
    done = run(*SMALL, *sweep, "--json", str(out))
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in out.read_text().splitlines() if '"dispatch"' in line]
    assert [record["skew"] for record in records] == [0, 0.5, 1.5]
    times = [record["bound_ms"] for record in records]
    assert times == sorted(times)
    assert CliRunner().invoke(app, ("explore", str(out), "--out", str(page))).exit_code == 0
    assert "over skew" in page.read_text()


def test_many_ranks_are_answered_by_bounds(tmp_path):
    out = tmp_path / "out.jsonl"
    many = ("--cluster", "gb200-nvl72", "--nodes", "20", "--traffic", "skewed", "--systems", "no-lanes")
    done = run(*many, "--json", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text().splitlines()[0])
    assert record["ranks"] == 1440
    assert record["tier"] == "bound"
    assert len(out.read_text()) < 2_000_000


@pytest.mark.parametrize("suffix", ["goal", "cm"])
def test_an_export_is_written(tmp_path, suffix):
    path = tmp_path / f"plan.{suffix}"
    done = run(*SMALL, "--nodes", "2", "--export", str(path))
    assert done.exit_code == 0
    assert f"wrote {path}, " in done.output
    assert path.read_text().startswith({"goal": "num_ranks 4", "cm": "Nodes 4"}[suffix])


def test_an_export_of_a_file_for_each_rank_says_which(tmp_path):
    done = run(*SMALL, "--nodes", "2", "--export", str(tmp_path / "plan.et"))
    files = [tmp_path / f"plan.{rank}.et" for rank in range(4)]
    size = sum(file.stat().st_size for file in files)
    assert f"wrote {files[0]} to {files[3]}, {size / 1e3:.1f} kB" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "none"), "'none' is no file .toml and none of"),
        (("--cluster", "none.toml"), "there is no file none.toml"),
        (("--nodes", "0"), "--nodes needs positive integers, got '0'"),
        (("--sweep-skew", "1"), "--sweep-skew goes with --traffic zipf, not with uniform"),
        (("--traffic", "zipf", "--sweep-skew", "-1"), "--sweep-skew needs numbers from 0 on, got '-1'"),
        (("--systems", "none"), "systems 'none' is not one of"),
        (("--nodes", "200", "--traffic", "trace"), "--traffic trace is for at most 1024 ranks"),
        (("--cluster", "none.toml", "--export", "plan.json"), "an export is a file .goal, .cm, .et, got plan.json"),
        (("--measure", "cluster.toml"), "run it under torchrun"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in str(done.exception)

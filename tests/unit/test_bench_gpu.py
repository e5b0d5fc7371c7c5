"""The tool that measures two GPUs: its parts are valid commands, have limits, and leave no process behind."""

import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import typer

from fusco.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "tools" / "bench_gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_part_is_a_valid_command(tool):
    for part in tool.PARTS.values():
        command, arguments = typer.main.get_command(app), list(part.arguments)
        while hasattr(command, "commands") and arguments[0] in command.commands:
            command = command.commands[arguments.pop(0)]
        context = command.make_context(command.name, arguments)  # raises for an unknown option or value
        assert context.params["device"] == "cuda"
        assert part.limit_s <= tool.LIMIT_S


def test_parts_that_end_fail_or_hang(tool, tmp_path):
    record = {
        "variant": "fusco",
        "dispatch_ms": 1.0,
        "combine_ms": None,
        "total_ms": 2.5,
        "loop_ms": 3.0,
        "verified": True,
    }
    write = f"import json, sys; open(sys.argv[-1], 'w').write({json.dumps(record)!r}); print('a table')"
    # A hanging part, with a process of its own that would outlive it.
    hang = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parts = {
        "good": tool.Part((write,), 20.0),
        "bad": tool.Part(("raise SystemExit(3)",), 20.0),
        "hanging": tool.Part((hang,), 1.0),
    }
    outcomes = tool.run_parts(parts, tmp_path, 60.0, (sys.executable, "-c"))
    assert {name: outcome.how for name, outcome in outcomes.items()} == {
        "good": "done",
        "bad": "failed",
        "hanging": "out of time",
    }
    assert (tmp_path / "good.txt").read_text() == "a table\n"
    child = int((tmp_path / "hanging.txt").read_text())
    assert wait_for_end(child)
    lines = tool.summarize(tmp_path, outcomes).splitlines()
    assert lines[2] == "| good | fusco | 1.000 | - | 2.500 | 3.000 | - | yes |"
    assert lines[3].startswith("| bad | failed after")
    assert lines[4].startswith("| hanging | out of time after 1 s")


def wait_for_end(pid: int) -> bool:
    """Whether a process is gone, or a zombie that only its new parent can remove."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_would_begin_after_the_limit_is_left_out(tool, tmp_path):
    parts = {name: tool.Part(("import time; time.sleep(60)",), 30.0) for name in ("first", "second")}
    outcomes = tool.run_parts(parts, tmp_path, 0.5, (sys.executable, "-c"))
    assert [outcome.how for outcome in outcomes.values()] == ["out of time", "left out"]


def test_a_training_run_has_one_line(tool, tmp_path):
    run = dict.fromkeys(("dispatch_ms", "combine_ms", "dispatch_backward_ms", "combine_backward_ms"), 1.0)
    records = [{"kind": "step"}, {"kind": "run", "dispatcher": "torch", "step_ms": 186.0, **run}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + os.linesep for record in records))
    lines = tool.summarize(tmp_path, {"train": tool.Outcome("done", 1.0)}).splitlines()
    assert lines[2:] == ["| train | torch | 1.00 + 1.00 | 1.00 + 1.00 | step 186.0 | | | |"]


def test_a_prefill_has_a_line_for_each_variant(tool, tmp_path):
    record = {"kind": "prefill", "variant": "torch", "dispatch_ms": 1.0, "combine_ms": 2.0, "verified": True}
    records = [{"kind": "skipped", "variant": "deep_ep"}, {**record, "batch": "skewed: 8, 1", "ttft_ms": 33.333}]
    (tmp_path / "prefill.jsonl").write_text("".join(json.dumps(each) + os.linesep for each in records))
    lines = tool.summarize(tmp_path, {"prefill": tool.Outcome("done", 1.0)}).splitlines()
    assert lines[2:] == ["| prefill | torch | 1.00 | 2.00 | skewed: 8, 1: 33.3 | | | yes |"]


def test_frameworks_find_the_module_of_their_part(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("bench_frameworks")
    parts = tool.parts_of(tmp_path, tmp_path, tmp_path)
    assert [name for name, part in parts.items() if part.deep_ep == tmp_path] == ["intranode-deep_ep"]
    (tmp_path / "deep_ep.py").write_text("")
    script = (
        "import deep_ep, os, sys; print('Best', os.getcwd(), deep_ep.__file__); sys.exit('fusco' in deep_ep.__file__)"
    )
    command = (sys.executable, "-c", script)
    ends = tool.run_parts(
        {
            "peer": tool.Part(command, tmp_path, tmp_path, 20.0),
            "ours": tool.Part(
                (sys.executable, "-c", "import time; print('quiet'); time.sleep(9)"), tmp_path, ROOT, 0.5
            ),
        },
        tmp_path / "out",
    )
    assert ends == {"peer": "done", "ours": "out of time"}
    printed = capsys.readouterr().out
    assert f"Best {tmp_path} {tmp_path / 'deep_ep.py'}" in printed
    assert "quiet" not in printed

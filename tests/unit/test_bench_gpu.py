"""The tool that measures two GPUs: its parts are valid commands, have limits, and leave no process behind."""

import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
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


@pytest.fixture
def frameworks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_frameworks")


def test_frameworks_have_the_parts_that_were_carried(frameworks, tmp_path):
    carried, out, site = tmp_path / "carried", tmp_path / "out", tmp_path / "site"
    out.mkdir()
    assert list(frameworks.parts_of(carried, out, site, "cuda")) == ["prefill", "megatron-steps"]
    for name in ("megatron", "deep_ep", "hybrid_ep", "peer"):
        (carried / name).mkdir(parents=True)
    parts = frameworks.parts_of(carried, out, site, "cuda")
    tests, steps = ["megatron-tests", "megatron-tests-deep_ep"], ["hybrid-fusco", "megatron-steps"]
    names = [*tests, "prefill", "intranode-fusco", "intranode-deep_ep", *steps]
    assert list(parts) == names
    of_peer = [name for name in names if parts[name].deep_ep == site / "peer"]
    assert of_peer == ["megatron-tests-deep_ep", "prefill", "intranode-deep_ep"]
    on_cpus = frameworks.parts_of(carried, out, site, "cpu")
    assert [name for name in names if name not in on_cpus] == ["megatron-tests-deep_ep", "intranode-deep_ep"]
    for device in ("cpu", "cuda"):
        for part in frameworks.parts_of(carried, out, site, device).values():
            script = Path(part.command[1])
            assert script.exists() or carried in script.parents or part.command[1] == "-m"
            assert "without_cuda.py" not in str(part.command) or device == "cpu"
    _, _, *arguments = parts["prefill"].command[1:]
    command = typer.main.get_command(app).commands["bench"].commands["prefill"]
    assert command.make_context("prefill", arguments[2:]).params["resume"]


def test_frameworks_find_the_module_of_their_part_and_resume(frameworks, monkeypatch, tmp_path, capsys):
    (tmp_path / "deep_ep.py").write_text("")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "carried_package.py").write_text("")
    script = (
        "import carried_package, deep_ep, os, sys; print('[testing] passed'); print('[tuning] SMs 24, chunk 4:'); "
        "print('Best', os.getcwd(), deep_ep.__file__, os.environ['TOKENS']); "
        "sys.exit('fusco' in deep_ep.__file__)"
    )
    peer = frameworks.Part(
        command=(sys.executable, "-c", script),
        limit_s=20.0,
        deep_ep=tmp_path,
        folder=tmp_path,
        environment={"TOKENS": "7"},
    )
    sleeping = frameworks.Part(
        command=(sys.executable, "-c", "import time; print('quiet'); time.sleep(9)"), limit_s=0.5
    )
    parts, out = {"peer": peer, "ours": sleeping, "late": peer}, tmp_path / "out"
    first = {**parts, "late": frameworks.Part(command=("false",), limit_s=0.0)}
    assert frameworks.run_parts(first, out, 30.0, packages=tmp_path / "packages") == {
        "peer": "done",
        "ours": "out of time",
        "late": "left out",
    }
    printed = capsys.readouterr().out
    assert f"Best {tmp_path} {tmp_path / 'deep_ep.py'} 7" in printed
    assert "peer: done, 1 passed, " in printed
    assert "quiet" not in printed
    assert "chunk 4" not in printed
    (tmp_path / "deep_ep.py").unlink()  # what was done is not run again, and its lines are shown again
    ends = frameworks.run_parts(parts, out, 0.0, resumes=True)
    assert list(ends.values()) == ["done", "left out", "left out"]
    assert f"Best {tmp_path}" in capsys.readouterr().out


def test_a_summary_has_the_prefills_table(frameworks, tmp_path):
    job = {"shape": {"num_layers": 48}, "tokens": 8192, "dtype": "bfloat16", "num_iterations": 10}
    case = {
        "kind": "prefill",
        "routing": "random",
        "batch": "skewed: 8, 1",
        "verified": True,
        "job": job,
        "commit": "c",
    }
    records = [
        {"kind": "skipped", "variant": "deep_ep"},
        {**case, "variant": "fusco", "ttft_ms": 100.0, "slowest_ms": 263.0},
        {**case, "variant": "torch", "ttft_ms": 150.0, "slowest_ms": 151.0},
        {**case, "batch": "1 x 8", "variant": "fusco", "ttft_ms": 0.0, "slowest_ms": 0.0, "verified": False},
    ]
    (tmp_path / "prefill.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "megatron-tests.jsonl").write_text('{"verified": true}\n{"verified": false}\n')
    lines = frameworks.summarize(tmp_path, {"prefill": "done", "hybrid-fusco": "left out"}).splitlines()
    assert lines[:3] == ["- prefill: done", "- hybrid-fusco: left out", "- Megatron's tests: 1 of 2 cases passed"]
    assert "48 layers, 8192 tokens a rank, bfloat16, medians of 10, ms, commit c:" in lines
    assert "| routing | batch | fusco | torch | torch / fusco |" in lines
    assert "| random | skewed: 8, 1 | 100.0 (slowest 263.0) | 150.0 | 1.50 |" in lines
    assert "| random | 1 x 8 | NOT VERIFIED | - | - |" in lines


def test_code_that_names_cuda_runs_on_the_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("without_cuda")
    with tool.without_cuda():
        moved = [torch.zeros(2, device=torch.device("cuda", 1)), torch.ones(2).cuda(), torch.ones(2).to("cuda:0")]
        moved += [torch.ones(2, pin_memory=True), torch.nn.Linear(2, 2).cuda().weight]
        torch.set_default_device("cuda")
        moved.append(torch.ones(2))
        torch.set_default_device(None)
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("a name"):
            torch.cuda.current_stream().record_event().synchronize()
    assert {each.device.type for each in moved} == {"cpu"}
    assert torch.cuda.Stream.__module__.startswith("torch.")

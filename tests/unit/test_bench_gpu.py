"""The tool that measures two GPUs: its parts are valid commands, have limits, and leave no process behind."""

import importlib
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


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def tool():
    return importlib.import_module("bench_gpu")


def part(script, limit_s, **more):
    return importlib.import_module("parts").Part(command=(sys.executable, "-c", script), limit_s=limit_s, **more)


@pytest.fixture
def carried(tmp_path):
    """What a part needs that fusco does not contain: the referee's interface of its command line."""
    referee = tmp_path / "carried" / "collectivex"
    (referee / "configs").mkdir(parents=True)
    return tmp_path / "carried"


def parse(arguments, tmp_path):
    """Return the device and the file of records that a part's command line names; raises for what it does not know."""
    if arguments[:2] == ["-m", "fusco"]:
        command, arguments = typer.main.get_command(app), arguments[2:]
        while hasattr(command, "commands") and arguments[0] in command.commands:
            command = command.commands[arguments.pop(0)]
        chosen = command.make_context(command.name, arguments).params
        return chosen["device"], chosen["json"]
    if arguments[:2] == ["-m", "attack"]:
        from attack.__main__ import parse as parse_attack  # noqa: PLC0415  not on the path elsewhere

        chosen = parse_attack(arguments[2:])
    elif Path(arguments[0]).stem == "expert_copies":
        chosen = importlib.import_module("expert_copies").new_parser().parse_args(arguments[1:])
    else:
        assert arguments[:4] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        assert Path(arguments[4]).exists()
        chosen = importlib.import_module("collectivex").new_parser().parse_args(arguments[5:])
        assert chosen.referee == tmp_path / "carried" / "collectivex"
    return chosen.device, chosen.json


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_is_a_valid_command(tool, tmp_path, carried, device, monkeypatch):
    for folder in ("tests/multirank", "tests/unit/rails"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    parts = tool.parts_of(tmp_path, tmp_path, device, carried)
    assert {"h7168-t128", "h2048-t16384", "nodes-t8192", "decode-fp8", "balance", "survivors"} < set(parts)
    assert [name for name in parts if name.startswith("referee")] == [
        f"referee-{mode}-{precision}"
        for mode in ("normal-decode", "low-latency-decode", "normal-prefill")
        for precision in ("bf16", "fp8")
    ]
    for each in parts.values():
        assert parse(list(each.command[1:]), tmp_path) == (device, each.records)
        assert each.limit_s <= 300


def test_records_come_back_in_one_file(tool, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"kind": "step", "loss": 2.0}\n')
    (tmp_path / "train.txt").write_text("a table\n")
    tool.gather(tmp_path, dict.fromkeys(("train", "left out"), tool.Outcome("done", 1.0)), "cpu")
    origin, *records = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert list(origin) == ["source", "date", "commit", "hardware"]
    assert records == [{"part": "train", "kind": "step", "loss": 2.0}]
    assert (tmp_path / "logs.txt").read_text() == "== train\na table\n\n"


def test_parts_that_end_fail_or_hang(tool, tmp_path):
    times = {"dispatch_ms": 1.0, "combine_ms": None, "total_ms": 2.5, "loop_ms": 3.0}
    good = tmp_path / "good.jsonl"
    good.write_text("of an earlier run")
    record = json.dumps({"variant": "fusco", **times, "verified": True})
    write = f"open({str(good)!r}, 'x').write({record!r}); print('a table')"
    # A hanging part, with a process of its own that would outlive it.
    hang = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parts = {
        "good": part(write, 20.0, records=good),
        "bad": part("raise SystemExit(3)", 20.0),
        "hanging": part(hang, 1.0),
    }
    outcomes = tool.run_parts(parts, tmp_path, 60.0)
    ends = {name: outcome.how for name, outcome in outcomes.items()}
    assert ends == {"good": "done", "bad": "failed", "hanging": "out of time"}
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
    parts = {name: part("import time; time.sleep(60)", 30.0) for name in ("first", "second")}
    outcomes = tool.run_parts(parts, tmp_path, 0.5)
    assert [outcome.how for outcome in outcomes.values()] == ["out of time", "left out"]


def test_a_training_run_has_one_line(tool, tmp_path):
    run = dict.fromkeys(("dispatch_ms", "combine_ms", "dispatch_backward_ms", "combine_backward_ms"), 1.0)
    records = [{"kind": "step"}, {"kind": "run", "dispatcher": "torch", "step_ms": 186.0, **run}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + os.linesep for record in records))
    lines = tool.summarize(tmp_path, {"train": tool.Outcome("done", 1.0)}).splitlines()
    assert lines[2:] == ["| train | torch | 1.00 + 1.00 | 1.00 + 1.00 | step 186.0 |  |  |  |"]


def test_a_prefill_has_a_line_for_each_variant(tool, tmp_path):
    record = {"kind": "prefill", "variant": "torch", "dispatch_ms": 1.0, "combine_ms": 2.0, "verified": True}
    record["routing"] = "skew2"
    records = [{"kind": "skipped", "variant": "deep_ep"}, {**record, "batch": "skewed: 8, 1", "ttft_ms": 33.333}]
    (tmp_path / "prefill.jsonl").write_text("".join(json.dumps(each) + os.linesep for each in records))
    lines = tool.summarize(tmp_path, {"prefill": tool.Outcome("done", 1.0)}).splitlines()
    assert lines[2:] == ["| prefill | torch | 1.00 | 2.00 | skew2, skewed: 8, 1: 33.3 |  |  | yes |"]


def test_a_decode_has_a_line_for_each_variant(tool, tmp_path):
    record = {"kind": "bench.decode", "variant": "allgather", "tokens": 64, "micro_batches": 2, "tpot_ms": 12.5}
    (tmp_path / "decode-fp8.jsonl").write_text(json.dumps({**record, "verified": False}) + os.linesep)
    lines = tool.summarize(tmp_path, {"decode-fp8": tool.Outcome("done", 1.0)}).splitlines()
    assert lines[2:] == ["| decode-fp8 | allgather |  |  | 64 tokens in 2: 12.500 |  |  | NO |"]


def test_a_strike_and_a_point_of_the_referee_have_lines(tool, tmp_path):
    strike = {"kind": "strike", "ranks": 4, "strikes": "SIGKILL to rank 1", "right_s": 0.25}
    (tmp_path / "survivors.jsonl").write_text(json.dumps(strike) + "\n")
    times = {"dispatch": 10.0, "combine": 20.0, "roundtrip": 40.0, "pair_period": 35.0}
    components = {name: {"percentiles_us": {"p50": us}} for name, us in times.items()}
    row = {"tokens_per_rank": 8, "components": components, "correctness": {"passed": True}}
    document = {"record_type": "case-attempt", "implementation": {"name": "fusco"}, "measurement": {"rows": [row]}}
    (tmp_path / "referee.jsonl").write_text(json.dumps(document) + "\n")
    ends = dict.fromkeys(("survivors", "referee"), tool.Outcome("done", 1.0))
    lines = tool.summarize(tmp_path, ends).splitlines()
    assert lines[2:] == [
        "| survivors | fusco |  |  | 4 ranks, SIGKILL to rank 1: right after 250 |  |  | yes |",
        "| referee | fusco, 8 tokens | 0.010 | 0.020 | 0.040 | 0.035 |  | yes |",
    ]


@pytest.fixture
def frameworks():
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
    of_peer = [name for name in names if parts[name].environment["PYTHONPATH"].startswith(str(site / "peer"))]
    assert of_peer == ["megatron-tests-deep_ep", "prefill", "intranode-deep_ep"]
    on_cpus = frameworks.parts_of(carried, out, site, "cpu")
    assert [name for name in names if name not in on_cpus] == ["megatron-tests-deep_ep", "intranode-deep_ep"]
    for device in ("cpu", "cuda"):
        for each in frameworks.parts_of(carried, out, site, device).values():
            script = Path(each.command[1])
            assert script.exists() or carried in script.parents or each.command[1] == "-m"
            assert "without_cuda.py" not in str(each.command) or device == "cpu"
    _, _, *arguments = parts["prefill"].command[1:]
    command = typer.main.get_command(app).commands["bench"].commands["prefill"]
    assert command.make_context("prefill", arguments[2:]).params["resume"]


def test_frameworks_find_the_module_of_their_part_and_resume(frameworks, tmp_path, capsys):
    (tmp_path / "deep_ep.py").write_text("")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "carried_package.py").write_text("")
    script = (
        "import carried_package, deep_ep, os, sys; print('[testing] passed'); print('[tuning] SMs 24, chunk 4:'); "
        "print('Best', os.getcwd(), deep_ep.__file__, os.environ['TOKENS']); "
        "sys.exit('fusco' in deep_ep.__file__)"
    )
    of_peer = {"deep_ep": tmp_path, "cwd": tmp_path, "environment": {"TOKENS": "7"}}
    peer = frameworks.part((sys.executable, "-c", script), 20.0, tmp_path, **of_peer)
    parts, out = {"peer": peer, "ours": part("import time; print('quiet'); time.sleep(9)", 0.5)}, tmp_path / "out"

    def run(late, limit_s, **more):
        outcomes = frameworks.run_parts({**parts, "late": late}, out, limit_s, show=frameworks.show, **more)
        return {name: outcome.how for name, outcome in outcomes.items()}

    assert run(part("", 0.0), 30.0) == {"peer": "done", "ours": "out of time", "late": "left out"}
    printed = capsys.readouterr().out
    assert f"Best {tmp_path} {tmp_path / 'deep_ep.py'} 7" in printed
    assert "peer: done after " in printed
    assert "1 passed" in printed
    assert "quiet" not in printed
    assert "chunk 4" not in printed
    (tmp_path / "deep_ep.py").unlink()  # what was done is not run again, and its lines are shown again
    assert run(peer, 0.0, resumes=True) == {"peer": "done", "ours": "left out", "late": "left out"}
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
    ends = {"prefill": frameworks.Outcome("done", 1.0), "hybrid-fusco": frameworks.Outcome("left out", 0.0)}
    lines = frameworks.summarize(tmp_path, ends).splitlines()
    assert lines[:3] == ["- prefill: done", "- hybrid-fusco: left out", "- Megatron's tests: 1 of 2 cases passed"]
    assert "48 layers, 8192 tokens a rank, bfloat16, medians of 10, ms, commit c:" in lines
    assert "| routing | batch | fusco | torch | torch / fusco |" in lines
    assert "| random | skewed: 8, 1 | 100.0 (slowest 263.0) | 150.0 | 1.50 |" in lines
    assert "| random | 1 x 8 | NOT VERIFIED | - | - |" in lines


def test_code_that_names_cuda_runs_on_the_cpu():
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

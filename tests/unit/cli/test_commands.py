"""The command line without ranks: help at once, errors as sentences, plan and doctor."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fusco.balancer import BALANCERS
from fusco.bench.traffic import Pattern
from fusco.cli.main import app
from fusco.cli.options import BalancerName, Traffic, split_names


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_help_answers_within_a_second():
    best = 10.0
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "fusco", "--help"], capture_output=True, text=True, check=True)
        best = min(best, time.monotonic() - start)
    assert "bench" in done.stdout
    assert best < 1.0


def test_option_names_are_those_of_the_library():
    assert [name.value for name in Traffic] == [pattern.value for pattern in Pattern]
    assert [name.value for name in BalancerName] == list(BALANCERS)


@pytest.mark.parametrize("traffic", [traffic.value for traffic in Traffic])
def test_plan_explains_every_pattern(traffic, tmp_path):
    out = tmp_path / "plan.jsonl"
    done = run("plan", "--traffic", traffic, "--tokens", "64", "--json", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["traffic"] == traffic
    assert sum(record["group_loads"]) == sum(rank["sends"] for rank in record["ranks"])
    assert sum(rank["sends"] for rank in record["ranks"]) == sum(rank["receives"] for rank in record["ranks"])
    assert record["internode_bytes"] == sum(record["group_loads"]) * record["bytes_per_token"]
    assert "duplicates avoided" in done.output


def test_plan_says_what_does_not_fit():
    done = run("plan", "--num-experts", "30")
    assert "30 experts do not divide evenly among 8 ranks" in str(done.exception)
    done = run("plan", "--traffic", "single-node", "--num-experts", "8", "--num-topk", "8")
    assert "8 experts of a token do not fit on one of 2 nodes" in str(done.exception)


def test_bad_input_is_a_sentence_and_exit_code_2():
    command = [sys.executable, "-m", "fusco", "bench", "shuffle", "--num-topk", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: the trace has top-8, num_topk is 4" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--nodes", "2", "--ranks-per-node", "4"], "8 ranks need a GPU each, but torch finds 4"),
        (["--device", "cuda", "--nodes", "3"], "4 GPUs do not divide among 3 nodes"),
        (["--device", "cuda", "--ablation"], "there is 1: pass --nodes"),
        (["--device", "cuda", "--nodes", "2", "--variants", "fusco-graph"], "'fusco-graph' is none of those on cuda"),
        (["--variants", "fusco,best"], "variant 'best' is none of those on cpu with 2 nodes: fusco, baseline"),
        (["--traffic", "uniform,rush-hour"], "traffic 'rush-hour' is none of trace, uniform, single-node"),
        (["--traffic", ","], "--traffic needs at least one name"),
        (["--traffic", "uniform", "--trace", __file__], "--trace goes with --traffic trace, not with uniform"),
        (["--timeline", "out.json"], "it goes with --device cuda"),
        (
            ["--device", "cuda", "--timeline", "out.json", "--variants", "baseline"],
            "shows fusco or fusco-static, but the variants are baseline",
        ),
    ],
)
def test_bench_shuffle_says_what_does_not_fit(arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    done = run("bench", "shuffle", *arguments)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "arguments",
    [["bench", "shuffle"], ["bench", "shuffle", "--variants", "fusco-static"], ["bench", "alltoall"], ["train"]],
)
def test_on_gpus_it_says_how_to_get_what_compiles_kernels(arguments, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("cuda") else find_spec(name))
    monkeypatch.setattr("fusco.bench.local_world.LocalWorld.__init__", lambda *_, **__: pytest.fail("it starts ranks"))
    if arguments == ["train"]:
        pytest.importorskip("transformers", reason="fusco train needs it")
    done = run(*arguments, "--device", "cuda")
    assert str(done.exception) == "device 'cuda' needs the package cuda-core: pip install 'fusco[cuda]'"


def test_names_come_with_commas_or_repeated():
    assert split_names(["fusco, baseline", "fusco", "no-engine"]) == ["fusco", "baseline", "no-engine"]


def test_doctor_finds_the_cpu_backend_usable():
    done = run("doctor", "--json")
    assert done.exit_code == 0
    findings = {finding["check"]: finding for finding in map(json.loads, done.output.splitlines())}
    assert findings["shared memory"]["state"] == "ok"
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")


def test_balancers_are_compared(tmp_path):
    out = tmp_path / "balancers.jsonl"
    assert run("bench", "balancers", "--draws", "5", "--json", str(out)).exit_code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["balancer"] for record in records} == set(BALANCERS)
    assert all(record["group_load_ratio"] >= 1 for record in records)

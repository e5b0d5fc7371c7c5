"""The benchmark with real ranks, and the README's example."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import launch
from typer.testing import CliRunner

from fusco.cli.main import app

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[2]
FIELDS = [
    "variant",
    "traffic",
    "nodes",
    "ranks_per_node",
    "tokens",
    "hidden",
    "verified",
    "dispatch_ms",
    "combine_ms",
    "planning_ms",
    "rearranging_ms",
    "total_ms",
    "internode_row_bytes",
    "internode_row_bytes_lower_bound",
    "metadata_bytes",
    "versions",
    "hardware",
]


VARIANTS = ["fusco", "baseline", "no-engine", "no-planner", "no-lanes", "no-balancer"]
SHAPE = ["--tokens", "32", "--hidden", "64", "--iterations", "2"]


@pytest.mark.multirank
def test_bench_shuffle_writes_one_record_for_each_traffic_and_variant(tmp_path):
    out, page = tmp_path / "shuffle.jsonl", tmp_path / "shuffle.html"
    options = ["--traffic", "trace,imbalanced", "--ablation", *SHAPE, "--json", str(out), "--html", str(page)]
    done = CliRunner().invoke(app, ["bench", "shuffle", *options])
    assert done.exit_code == 0, done.output
    assert all(f"shuffle, {traffic} traffic" in done.output for traffic in ("trace", "imbalanced"))
    flat = " ".join(done.output.split())
    findings = re.findall(r"(\w+) traffic: fusco [\d.,]+ ms, baseline [\d.,]+ ms: [^:]+, verified", flat)
    assert findings == ["trace", "imbalanced"]
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert [line["traffic"] for line in lines] == ["trace"] * len(VARIANTS) + ["imbalanced"] * len(VARIANTS)
    for records in ({line["variant"]: line for line in part} for part in (lines[:6], lines[6:])):
        assert list(records) == VARIANTS
        for record in records.values():
            assert all(name in record for name in FIELDS)
            assert record["verified"] is True
            assert record["total_ms"] > 0
        ours, other = records["fusco"], records["baseline"]
        assert ours["internode_row_bytes"] == ours["internode_row_bytes_lower_bound"] > 0
        for same in ("no-engine", "no-balancer"):
            assert records[same]["internode_row_bytes"] == ours["internode_row_bytes"]
        assert other["internode_row_bytes"] > ours["internode_row_bytes"]
        assert records["no-planner"]["internode_row_bytes"] > ours["internode_row_bytes"]
        assert min(record["rearranging_ms"] for record in (other, records["no-engine"])) > 0
        assert records["no-balancer"]["balancer"] == "static"
    text = page.read_text()
    assert all(f'"kind":"{kind}"' in text for kind in ("runs", "copies", "links", "matrix", "experts", "replay"))


@pytest.mark.multirank
def test_a_scheme_of_the_caller_is_verified_and_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'examples'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    out = tmp_path / "own.jsonl"
    options = ["--traffic", "zipf", "--variants", "fusco,own_scheme:Ring", *SHAPE, "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "shuffle", *options])
    assert done.exit_code == 0, done.output
    ours, own = map(json.loads, out.read_text().splitlines())
    assert (own["variant"], own["verified"], own["balancer"]) == ("own_scheme:Ring", True, "none")
    assert re.search(r"rows within nodes +│ +[\d.]+ MB │ +- │", done.output)  # nobody has counted them
    assert min(ours["total_ms"], own["total_ms"]) > 0


@pytest.mark.multirank
def test_a_benchmark_that_is_terminated_ends_at_once_and_leaves_no_process_behind():
    """As by timeout and job schedulers, which tell this process alone; a test of ``fusco train`` has Ctrl-C."""
    options = ["--traffic", "uniform", *SHAPE, "--ranks-per-node", "1", "--iterations", "1000000"]
    command = [sys.executable, "-m", "fusco", "bench", "shuffle", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for_ranks(process.pid, 2)
        process.terminate()
        _, errors = process.communicate(timeout=30)  # the pipes are open as long as any process is left
    assert process.returncode == 143
    assert said(errors) == ["terminated"]
    assert wait_until(lambda: not of_session(process.pid), 10.0), of_session(process.pid)


def said(errors: str) -> list[str]:
    """Lines but for those that say where slow work is, as on a machine with much to do."""
    return [line for line in errors.splitlines() if not re.fullmatch(r"fusco: .*, after \d+ s", line)]


def of_session(session: int) -> list[str]:
    """The stat lines of the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = stat.read_text()
        except OSError:
            continue  # it has ended
        state, *fields = line.rpartition(")")[2].split()
        if int(fields[2]) == session and state != "Z":
            found.append(line)
    return found


def wait_until(is_so, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-topk", "4"], "error: the trace has top-8, num_topk is 4"),  # before the ranks have joined
        (["--traffic", "single-node", "--num-experts", "8", "--num-topk", "8"], "8 experts per token do not fit"),
    ],
)
def test_ranks_of_a_launched_job_print_an_error_once(tmp_path, options, message):
    done = launch(2, "fusco", ["bench", "shuffle", "--ranks-per-node", "1", *SHAPE, *options], tmp_path)
    assert not done.is_ok
    assert done.stderr.count(message) == 1, done.stderr


def wait_for_ranks(session: int, num_ranks: int) -> None:
    """Wait until this number of processes of a session have computed for a while."""
    tick, deadline = os.sysconf("SC_CLK_TCK"), time.monotonic() + 90
    while time.monotonic() < deadline:
        busy = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            busy += int(fields[3]) == session and int(fields[11]) + int(fields[12]) > tick
        if busy >= num_ranks + 2:  # the parent, and the fork server
            return
        time.sleep(0.1)
    raise AssertionError(f"{num_ranks} ranks are not at work")


@pytest.mark.multirank
def test_bench_shuffle_runs_on_the_ranks_of_a_launched_job(tmp_path):
    out = tmp_path / "launched.jsonl"
    options = ["--ranks-per-node", "1", "--traffic", "uniform", *SHAPE, "--json", str(out)]
    done = launch(2, "fusco", ["bench", "shuffle", *options], tmp_path / "logs")
    assert done.is_ok, done.stderr
    assert done.stdout.count("shuffle, uniform traffic: 2 nodes x 1 rank,") == 1, "one rank speaks for all"
    records = list(map(json.loads, out.read_text().splitlines()))
    assert [record["variant"] for record in records] == ["fusco", "baseline"]
    assert all(record["verified"] and record["nodes"] == 2 for record in records)


@pytest.mark.multirank
def test_bench_alltoall_writes_one_record_for_each_matrix(tmp_path):
    out = tmp_path / "alltoall.jsonl"
    arguments = ["--bytes-per-rank", "20000", "--iterations", "2", "--schedule", "few", "--skew", "0.5"]
    done = CliRunner().invoke(app, ["bench", "alltoall", *arguments, "--json", str(out)])
    assert done.exit_code == 0, done.output
    records = {record["matrix"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert list(records) == ["uniform", "random", "zipf", "trace"]
    for record in records.values():
        assert record["verified"] is True
        assert record["schedule"] == "few"
        assert record["internode_bytes"] == record["internode_bytes_needed"] > 0
        assert record["busiest_rank_bytes"] >= record["lane_bytes"] >= record["lane_bytes_lower_bound"] > 0
        assert min(record[f"{name}_ms"] for name in ("fusco", "all_to_all_single", "lower_bound", "wire")) > 0
        assert {"torch", "numpy"} <= set(record["versions"])


def test_the_readme_shows_the_example():
    shown = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert shown in (ROOT / "examples" / "moe_layer.py").read_text()


@pytest.mark.multirank
def test_the_example_runs(tmp_path):
    done = launch(4, str(ROOT / "examples" / "moe_layer.py"), [], tmp_path)
    assert done.is_ok, done.stderr


@pytest.mark.multirank
def test_the_example_of_metrics_counts_calls(tmp_path):
    done = launch(2, str(ROOT / "examples" / "metrics.py"), ["--folder", str(tmp_path)], tmp_path / "logs")
    assert done.is_ok, done.stderr
    texts = [(tmp_path / f"fusco-metrics-{rank}.prom").read_text() for rank in (0, 1)]
    assert done.stdout == texts[0]
    for text in texts:
        assert 'fusco_calls_total{verb="dispatch"} 10' in text
        assert 'fusco_calls_total{verb="combine"} 10' in text
        assert re.search(r'fusco_bytes_total\{verb="dispatch",kind="intranode_row"\} [1-9]', text)


@pytest.mark.multirank
def test_a_timeline_on_cpus_shows_what_each_rank_does(tmp_path):
    out = tmp_path / "timeline.json"
    shape = ["--nodes", "2", "--ranks-per-node", "1", "--tokens", "512", "--hidden", "2048", "--iterations", "2"]
    options = [*shape, "--timeline", str(out)]
    done = CliRunner().invoke(app, ["bench", "shuffle", *options])
    assert done.exit_code == 0, done.output
    trace = json.loads(out.read_text())
    assert "one dispatch and combine of fusco" in trace["otherData"]["what"]
    for rank in (0, 1):
        spans = [each for each in trace["traceEvents"] if each["pid"] == rank and each["ph"] == "X"]
        calls = {each["name"].split(" #")[0]: each for each in spans if each["cat"] == "calls"}
        assert set(calls) == {"dispatch", "combine"}
        assert {"planning", "staging", "wire"} <= {each["name"] for each in spans if each["cat"] == "parts of calls"}
        assert {"send rows", "receive rows", "scatter rows", "fold sums"} <= {each["cat"] for each in spans}
        begin, end = calls["dispatch"]["ts"], calls["combine"]["ts"] + calls["combine"]["dur"]
        assert all(begin <= each["ts"] <= each["ts"] + each["dur"] <= end + 1 for each in spans)

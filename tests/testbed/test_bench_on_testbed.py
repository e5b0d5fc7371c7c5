"""Benchmarks on a testbed: verified there, over the ranks' rails, and compared with their rate; the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMON = ["--testbed", "2x1", "--rate", "1gbit", "--iterations", "1", "--json", "-"]


def bench(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "fusco", "bench", *arguments, *COMMON]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_shuffle_takes_the_time_of_its_bytes():
    sizes = ["--tokens", "1024", "--hidden", "1024", "--num-experts", "8", "--num-topk", "2", "--traffic", "uniform"]
    records = bench("shuffle", *sizes)
    assert [record["variant"] for record in records] == ["fusco", "baseline"]
    for record in records:
        assert record["verified"]
        assert record["nodes"] == 2
        assert abs(record["bound_ms"] - record["busiest_rank_bytes"] / 125000) < 0.01  # bytes a millisecond
        # A burst passes at once; nothing else is faster than the rails.
        assert record["bound_ms"] - 3 < min(record["dispatch_ms"], record["combine_ms"])
    assert records[0]["busiest_rank_bytes"] > 1_500_000


def test_alltoall_takes_the_rate_for_its_bound():
    (record,) = bench("alltoall", "--matrix", "zipf", "--bytes-per-rank", "4000000")
    assert record["verified"]
    assert record["rank_gbs"] == 0.125
    assert abs(record["lower_bound_ms"] - record["lane_bytes_lower_bound"] / 125000) < 0.01
    assert record["fusco_ms"] > record["lower_bound_ms"] - 3


def test_the_example_runs_on_hosts_as_it_is():
    command = [sys.executable, "-m", "fusco", "testbed", "--hosts", "2", "--", sys.executable, "examples/moe_layer.py"]
    # Unbuffered, Python writes a line and its end one after the other, and those of two ranks mix.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(line.split(":")[0] for line in result.stdout.splitlines()) == [
        f"rank {rank}, 2 node(s)" for rank in (0, 1)
    ]

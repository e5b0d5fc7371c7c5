"""Rails on a testbed: bandwidth of several NICs, isolation of their owners, failures, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from fusco.bench.rails import contention, roles
from fusco.bench.rails.crew import START_S, Crew
from fusco.bench.rails.faults import flap, kill
from fusco.rails import POLICIES
from fusco.testbed import Testbed

RATE = 400_000_000
DISCOVER = "from fusco.rails import discover_rails; print([r for r in discover_rails()])"

# As ranks with ranks_per_node=1 do that are on one host: each is worker 0, and connects to the earlier ones.
THREE_WORKERS = """
import time
from fusco.rails import Endpoint, discover_rails
ends = [Endpoint(worker=0, rails=discover_rails(None, 1), timeout_s=10.0) for _ in range(3)]
for i, there in enumerate(ends):
    for here in ends[:i]:
        channel = there.connect(here.listen())
        while not channel.is_complete:
            time.sleep(0.01)
        received = here.accept().irecv(buffer := bytearray(5))
        channel.isend(b"hello")
        assert received.wait() == 5 and buffer == b"hello"
        print(channel.rails)
for each in ends:
    each.close()
"""


@pytest.fixture(scope="module")
def bed():
    with Testbed(2, 2, RATE) as testbed:
        yield testbed


def test_two_idle_rails_are_twice_as_fast_as_one(bed):
    speeds = (contention.run_alone(bed, POLICIES[name], 2, 0.8)[0] for name in ("direct", "fuselink"))
    direct, both = (speed * 8e9 / RATE for speed in speeds)
    assert 0.85 < direct < 1.02  # the limit is real
    assert both > 1.75 * direct


def test_an_owner_is_not_slowed_down(bed):
    case = contention.Contention(1, 4_000_000, 0.06)
    direct, lent = (contention.run(bed, POLICIES[each], case, 2.0) for each in ("direct", "fuselink"))
    assert lent["victim mean ms"] < 1.3 * direct["victim mean ms"]
    assert lent["flows GB/s"] > 1.2 * direct["flows GB/s"]


def test_workers_of_one_host_connect_over_all_its_rails(bed):
    process = bed.spawn(0, [sys.executable, "-c", THREE_WORKERS], stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0].split() == ["(0,", "1)"] * 3


def test_rails_go_down_and_up_under_load(bed):
    results = flap(bed, "fuselink", 2.5)
    assert results["messages right"] > 10
    assert results["longest pause ms"] < 1500
    assert results["of 1 rail, the others down"] > 0.7
    assert results["of all rails, up again"] > 0.7


def test_rails_of_a_killed_worker_are_used_within_a_second(bed):
    assert kill(bed, "fuselink") < 1.0


def test_rails_are_discovered(bed):
    process = bed.spawn(1, [sys.executable, "-c", DISCOVER], stdout=subprocess.PIPE)
    found = process.communicate(timeout=30)[0]
    for i in range(2):
        assert f"interface='rail{i}', address='{bed.address(1, i)}', owners=({i},)" in found


def test_the_board_is_shown(bed):
    with Crew(bed, POLICIES["fuselink"]) as crew:
        sender, receiver = crew.hire((0, 0), (1, 0))
        crew.connect([(sender, receiver)])
        receiver.begin(roles.sink)
        sender.begin(roles.flow, time.monotonic() + START_S, 2.5)
        time.sleep(START_S)
        command = [sys.executable, "-m", "fusco", "rails", "--once", "--interval", "0.3", "--board", crew.board(0)]
        environment = {**os.environ, "COLUMNS": "120"}
        shown = subprocess.run(
            [*command, "--json", "-"], capture_output=True, text=True, timeout=30, check=True, env=environment
        )
    uses = {line["rail"]: line for line in map(json.loads, shown.stdout.splitlines())}
    assert [(uses[i]["interface"], uses[i]["worker"], uses[i]["is_owner"]) for i in range(2)] == [
        ("rail0", 0, True),
        ("rail1", 0, False),
    ]
    assert all(0.5 * RATE < 8e6 * use["sent_mb_per_s"] < 1.5 * RATE for use in uses.values())
    assert "borrows" in shown.stderr


def test_the_benchmarks_run(tmp_path):
    path = tmp_path / "out.jsonl"
    names = ["costs", "change", "incast", "serving", "all-to-all", "embeddings"]
    options = ["--rails", "2", "--rate", "300mbit", "--seconds", "0.6", "--policy", "fuselink", "--json", str(path)]
    command = [sys.executable, "-m", "fusco", "bench", "rails", "--only", ",".join(names), *options]
    subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(dict.fromkeys(record["benchmark"] for record in records)) == names
    assert all(value >= 0 for record in records for value in record["results"].values())
    costs = {record["case"]: record["results"]["us"] for record in records if record["benchmark"] == "costs"}
    assert costs["query the load of 4 rails"] < 10

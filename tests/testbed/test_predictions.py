"""Predictions beside a network whose rate is set, not fitted: dispatch, combine, all-to-all; with lanes, and without.

One job of 8 ranks, of which four are the network of 2x2, makes all calls, in less than a minute on two idle cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timed_calls
from forked_ranks import fork_ranks

from fusco.bench.simulation.laws import demand_of
from fusco.simulate.cluster import load_cluster
from fusco.simulate.demand import Demand
from fusco.simulate.run import simulate
from fusco.testbed import Testbed

NUM_HOSTS, RANKS_PER_HOST, RAILS = 4, 2, 4
SHAPES, PATTERNS, MATRICES = ((4, 2), (2, 2)), ("uniform", "single-node", "imbalanced", "trace"), ("uniform", "zipf")
MBIT, MBIT_OF_RAILS = (200, 500), 100
HEADERS = 0.993  # of packets of 9000 bytes
WITHIN = 0.10
MOST_BUSY = 0.8  # of the cores' time: a time that is too long where they were busier is not the network's


def cases_of(mbit: int) -> list[dict[str, Any]]:
    """Return cases that take 0.1 to 0.3 s at this rate, or, for ``MBIT_OF_RAILS``, over 1 to 4 rails of a rank."""
    if mbit == MBIT_OF_RAILS:
        even = {"shape": (2, 2), "pattern": "uniform"}
        return [with_expected({**even, "rails": n, "tokens": 480 * n}, mbit) for n in range(1, RAILS + 1)]
    cases: list[dict[str, Any]] = []
    for shape in SHAPES:
        tokens = mbit * 512 // 200 // (shape[0] // 2)
        of = {"shape": shape, "rails": 1}
        cases += [{**of, "pattern": each, "tokens": tokens * (1 + (each == "single-node"))} for each in PATTERNS]
        cases += [{**of, "matrix": each, "bytes": mbit * 30_000} for each in MATRICES]
    return [with_expected(case, mbit) for case in cases]


def with_expected(case: dict[str, Any], mbit: int) -> dict[str, Any]:
    """Add the predicted ms of each call; over several rails fusco's alone."""
    rate = case["rails"] * mbit / 8e3 * HEADERS
    cluster = load_cluster("testbed").resized(*case["shape"]).with_values("the rate that is set", nic_gbs=rate)
    if "matrix" in case:
        demand = Demand.of_matrix(case["matrix"], timed_calls.matrix_of(case), cluster.topology)
        calls = ["fast dispatch"]
    else:
        systems = timed_calls.BALANCERS if mbit in MBIT else ("fusco",)
        demand = demand_of(timed_calls.workload_of(case))
        calls = [f"{system} {call}" for system in systems for call in ("dispatch", "combine")]
    return {**case, "expected": {each: simulate(cluster, demand, *each.split()).makespan_ms for each in calls}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Cases and results of each rate."""
    rates = (*MBIT, MBIT_OF_RAILS)
    rounds, go_on = [cases_of(mbit) for mbit in rates], tmp_path_factory.mktemp("rates") / "round"
    num_rails, results = RANKS_PER_HOST * RAILS, []
    with Testbed(NUM_HOSTS, num_rails, rates[0] * 10**6, ranks_per_host=RANKS_PER_HOST) as bed:
        ranks = fork_ranks(bed, "timed_calls", json.dumps(rounds), str(go_on))
        for number, mbit in enumerate(rates):
            for rail in range(num_rails if number else 0):
                for host in range(NUM_HOSTS):
                    bed.set_rate(host, rail, mbit * 10**6)
            Path(f"{go_on}{number}").touch()
            line = ranks[0].stdout.readline()
            assert line, f"a rank has failed at {mbit} Mbit/s"
            results.append(json.loads(line))
        assert [rank.ended(30) for rank in ranks] == [0] * len(ranks)
    return {mbit: list(zip(*of, strict=True)) for mbit, *of in zip(rates, rounds, results, strict=True)}


def check(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Compare times with predictions; a time that is too long while the cores were full does not count."""
    wrong, busy, num_calls = [], [], 0
    for case, result in cases:
        for call, expected in case["expected"].items():
            took, num_calls = result["ms"][call], num_calls + 1
            if abs(expected / took - 1) <= WITHIN:
                continue
            what = case.get("pattern") or f"{case['matrix']} all-to-all"
            told = f"{what}, {case['rails']} rails, {call}: {expected:.0f} predicted, {took:.0f} ms"
            (busy if took > expected and result["busy"] > MOST_BUSY else wrong).append(told)
    assert not wrong
    if 2 * len(busy) > num_calls:
        pytest.skip(f"the cores were full: {len(busy)} of {num_calls} times are not the network's, as {busy[0]}")


@pytest.mark.parametrize("mbit", MBIT)
@pytest.mark.parametrize("shape", SHAPES, ids=["4x2", "2x2"])
def test_calls_take_the_time_that_is_predicted(measured, shape, mbit):
    check([each for each in measured[mbit] if each[0]["shape"] == shape])


def test_one_to_four_rails_take_the_time_that_is_predicted(measured):
    check(measured[MBIT_OF_RAILS])

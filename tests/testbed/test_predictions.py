"""Predictions beside a network whose rate is set, not fitted: dispatch, combine, all-to-all; with lanes, and without.

One job of 8 ranks, of which four are the network of 2x2, makes all calls, in less than a minute on two idle cores.
First what cores need is measured as ``fusco simulate --measure`` does, over a network that does not bind. Of 2x2 the
same calls are also predicted from the file that ``--measure`` writes over the network itself, in which nothing is set.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import timed_calls
from forked_ranks import fork_ranks

from fusco.bench.simulation.laws import demand_of
from fusco.rails.policy import Limits
from fusco.simulate.cluster import Cluster, load_cluster
from fusco.simulate.demand import Demand
from fusco.simulate.run import simulate
from fusco.testbed import Testbed

pytestmark = pytest.mark.timeout(600)  # three measurements on a machine that is not idle

NUM_HOSTS, RANKS_PER_HOST, RAILS = 4, 2, 4
MOST_TOKENS = 2560
FILE_SHAPE, MBIT_OF_FILE = (2, 2), 500
SHAPES, PATTERNS, MATRICES = ((4, 2), (2, 2)), ("uniform", "single-node", "imbalanced", "trace"), ("uniform", "zipf")
MBIT, MBIT_OF_RAILS, MBIT_OF_CORES = (200, 500), 100, 20_000
HEADERS = 0.993  # of packets of 9000 bytes
BURST_BYTES = 128 << 10  # that a NIC of a testbed lets pass at once after a pause
MEASURED = ("memory_gbs", "start_us", "plan_us", "core_gbs")
WITHIN = 0.10
MOST_BUSY, WITHIN_FULL = 0.6, 0.3  # of the time, by the prediction: ranks that wait for cores wait for each other
ATTEMPTS = 3
CROWDED = 16  # processes that want the cores, twice as many as ranks: what then takes too long is not the network's


Constants = Mapping[str, float]
Cases = list[tuple[dict[str, Any], dict[str, Any]]]  # and the results of each
Attempt = dict[int | str, Cases]  # by rate


def expected(cluster: Cluster, demand: Demand, name: str, call: str) -> tuple[float, float]:
    """Return the predicted time of a call, and the part of it in which the cores are busy."""
    result = simulate(cluster, demand, name, call)
    (cores,) = (link for link in result.links if link.kind == "cores")
    start_us = cluster.start_us + (cluster.plan_us if call == "dispatch" else 0.0)
    return result.makespan_ms, (cores.bound_ms + start_us / 1e3) / result.makespan_ms


def cases_of(mbit: int, of_shapes: Sequence[Constants]) -> list[dict[str, Any]]:
    """Return cases that take 0.1 to 0.3 s at this rate, or, for ``MBIT_OF_RAILS``, over 1 to 4 rails of a rank."""
    if mbit == MBIT_OF_RAILS:
        even = {"shape": (2, 2), "pattern": "uniform"}
        return [with_expected({**even, "rails": n, "tokens": 480 * n}, mbit, of_shapes) for n in range(1, RAILS + 1)]
    cases: list[dict[str, Any]] = []
    for shape in SHAPES:
        tokens = mbit * 512 // 200 // (shape[0] // 2)
        of = {"shape": shape, "rails": 1}
        cases += [{**of, "pattern": each, "tokens": tokens * (1 + (each == "single-node"))} for each in PATTERNS]
        cases += [{**of, "matrix": each, "bytes": mbit * 30_000} for each in MATRICES]
    return [with_expected(case, mbit, of_shapes) for case in cases]


def moved(case: dict[str, Any]) -> Demand:
    """Return what the calls of a case move."""
    if "matrix" in case:
        return Demand.of_matrix(case["matrix"], timed_calls.matrix_of(case), timed_calls.topology_of(case))
    return demand_of(timed_calls.workload_of(case))


def is_of_file(case: dict[str, Any]) -> bool:
    """Return whether a case is predicted from a file too: an all-to-all's stages have bursts, which files lack."""
    return case["shape"] == FILE_SHAPE and "matrix" not in case


def predicted_by_file(cluster: Cluster, case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with what a measured file predicts, of which nothing is known but the file."""
    found = {each: expected(cluster, moved(case), *each.split()) for each in case["expected"]}
    full = [each for each, (_, busy) in found.items() if busy > MOST_BUSY]
    return {**case, "expected": {each: ms for each, (ms, _) in found.items()}, "full": full}


def with_expected(case: dict[str, Any], mbit: int, of_shapes: Sequence[Constants]) -> dict[str, Any]:
    """Add the predicted ms of each call; over several rails fusco's alone. ``of_shapes`` are measured, by shape."""
    measured = of_shapes[SHAPES.index(case["shape"])]
    cluster = load_cluster("testbed").resized(*case["shape"]).with_values("measured", **measured)
    systems, demand = timed_calls.BALANCERS if mbit in MBIT else ("fusco",), moved(case)
    calls = [f"{system} {call}" for system in systems for call in ("dispatch", "combine")]
    calls = ["fast dispatch"] if "matrix" in case else calls
    chunks = demand.remote_rows * demand.bytes_per_row / cluster.topology.world_size / Limits().chunk_bytes
    of_each = max(chunks / case["rails"], math.ceil(int(chunks) / case["rails"]))  # a chunk is on one rail
    rate = chunks / of_each * mbit / 8e3 * HEADERS
    cluster = cluster.with_values("the rate that is set", nic_gbs=rate)
    burst_ms = BURST_BYTES * 8e-3 / mbit
    found = {each: expected(cluster, demand, *each.split()) for each in calls}
    full = [each for each, (_, busy) in found.items() if busy > MOST_BUSY]
    return {**case, "expected": {each: ms - burst_ms for each, (ms, _) in found.items()}, "full": full}


@contextmanager
def preferred() -> Iterator[None]:
    """Prefer the processes of this session to others, where the system allows it and this one is of a session."""
    group, before = Path("/proc/self/autogroup"), "0"
    with suppress(OSError):
        before = (group.read_text(encoding="ascii").split() or [before])[-1]  # nothing is read outside of sessions
        group.write_text("-20", encoding="ascii")
    try:
        yield
    finally:
        with suppress(OSError):
            group.write_text(before, encoding="ascii")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Cases and results of each rate in each attempt; all is measured anew while a call was right in none.

    The speed of a virtual machine's cores may change between the measurement of what they cost and the calls.
    """
    path, shape = tmp_path_factory.mktemp("rates") / "round", (NUM_HOSTS, RANKS_PER_HOST * RAILS)
    numbers, attempts = itertools.count(), list[Attempt]()
    with preferred(), Testbed(*shape, MBIT_OF_CORES * 10**6, ranks_per_host=RANKS_PER_HOST) as bed:
        ranks = fork_ranks(bed, "timed_calls", str(path), str(MOST_TOKENS))

        def times_of(mbit: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for host, rail in itertools.product(*map(range, shape)):
                bed.set_rate(host, rail, mbit * 10**6)
            write_round(path, next(numbers), cases)
            line = ranks[0].stdout.readline()
            assert line, f"a rank has failed at {mbit} Mbit/s"
            return [{**each, "wanting": os.getloadavg()[0]} for each in json.loads(line)]

        while len(attempts) < ATTEMPTS:
            results = Attempt()
            free = [{"shape": shape, "nic_gbs": MBIT_OF_CORES / 8e3 * HEADERS} for shape in SHAPES]
            constants = [{name: each[name] for name in MEASURED} for each in times_of(MBIT_OF_CORES, free)]
            for mbit in (*MBIT, MBIT_OF_RAILS):
                cases = cases_of(mbit, constants)
                files = [{"shape": FILE_SHAPE, "file": f"{path}.toml"}] if mbit == MBIT_OF_FILE else []
                results[mbit] = list(zip(cases, times_of(mbit, [*files, *cases])[len(files) :], strict=True))
                for cluster in [load_cluster(each["file"]) for each in files]:
                    of_file = [each for each in results[mbit] if is_of_file(each[0])]
                    results["by file"] = [(predicted_by_file(cluster, case), took) for case, took in of_file]
            attempts.append(results)
            if not any(others_than_predicted([each[key] for each in attempts]) for key in results):
                break
        write_round(path, next(numbers), [])
        assert [rank.ended(30) for rank in ranks] == [0] * len(ranks)
    return attempts


def write_round(path: Path, number: int, cases: list[dict[str, Any]]) -> None:
    """Write the cases of a round, whole at once."""
    beside = path.with_name("beside")
    beside.write_text(json.dumps(cases), encoding="utf-8")
    beside.rename(f"{path}{number}")


def others_than_predicted(attempts: Sequence[Cases]) -> list[tuple[str, bool]]:
    """Return a sentence for each call that took another time in every attempt, and whether others had the cores."""
    found: dict[tuple[int, str], tuple[str, bool]] | None = None
    for cases in attempts:
        told = {
            (i, call): (sentence(case, call, took), took > expected and result["wanting"] > CROWDED)
            for i, (case, result) in enumerate(cases)
            for call, expected in case["expected"].items()
            if abs(expected / (took := result["ms"][call]) - 1) > (WITHIN_FULL if call in case["full"] else WITHIN)
        }
        found = {key: of for key, of in told.items() if found is None or key in found}
    return list((found or {}).values())


def sentence(case: dict[str, Any], call: str, took: float) -> str:
    """Return what a call was predicted to take, and took."""
    what = case.get("pattern") or f"{case['matrix']} all-to-all"
    return f"{what}, {case['rails']} rails, {call}: {case['expected'][call]:.0f} predicted, {took:.0f} ms"


def check(attempts: Sequence[Cases]) -> None:
    """Compare times with predictions; a time that is too long while others had the cores does not count."""
    told = others_than_predicted(attempts)
    assert not [text for text, is_taken in told if not is_taken]
    if 2 * len(told) > (num_calls := sum(len(case["expected"]) for case, _ in attempts[-1])):
        pytest.skip(f"others had the cores: {len(told)} of {num_calls} times are not the network's, as {told[0][0]}")


@pytest.mark.parametrize("mbit", MBIT)
@pytest.mark.parametrize("shape", SHAPES, ids=["4x2", "2x2"])
def test_calls_take_the_time_that_is_predicted(measured, shape, mbit):
    check([[each for each in of[mbit] if each[0]["shape"] == shape] for of in measured])


def test_one_to_four_rails_take_the_time_that_is_predicted(measured):
    check([of[MBIT_OF_RAILS] for of in measured])


def test_a_file_that_measure_wrote_predicts_calls(measured):
    check([of["by file"] for of in measured])

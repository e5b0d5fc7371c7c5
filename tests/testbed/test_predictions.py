"""Predictions beside a network whose rate is set, not fitted: dispatch, combine and all-to-all on a testbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fusco.bench.inputs.matrices import make_rank_bytes
from fusco.bench.inputs.traffic import Trace, Workload
from fusco.bench.simulation.laws import demand_of
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.simulate import Demand, load_cluster, simulate

# Times of a network depend on what else runs: `make test-predictions` runs these alone, in three minutes.
pytestmark = pytest.mark.skipif(
    "FUSCO_TEST_PREDICTIONS" not in os.environ, reason="only with FUSCO_TEST_PREDICTIONS=1, on an idle machine"
)

_HEADERS = 0.993  # of packets of 9000 bytes
_WITHIN = 0.10
_MOST_OF_OTHERS = 0.15  # of the cores: where other processes take more, times are not the network's
_EXPERTS, _TOPK, _HIDDEN = 128, 8, 4096


def bench(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "fusco", "bench", *arguments, "--iterations", "2", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted(shape: tuple[int, int], mbit: int, pattern: str, tokens: int) -> dict[tuple[str, str], float]:
    """Dispatch and combine with lanes (``fusco``) and without, ms."""
    topology = Topology.of_equal_nodes(shape[0] * shape[1], shape[1])
    workload = Workload(
        pattern=pattern,
        topology=topology,
        placement=ExpertPlacement.contiguous(_EXPERTS, topology.world_size),
        tokens=tokens,
        hidden=_HIDDEN,
        num_topk=_TOPK,
        trace=Trace.load(None, None, 0) if pattern == "trace" else None,
    )
    cluster = load_cluster("testbed").resized(*shape).with_values("the rate that is set", nic_gbs=mbit / 8e3 * _HEADERS)
    demand = demand_of(workload)
    return {
        (name, call): simulate(cluster, demand, name, call).makespan_ms
        for name in ("fusco", "no-lanes")
        for call in ("dispatch", "combine")
    }


def skip_if_busy(records: list[dict]) -> None:
    if (busy := max(record.get("other_cores_share", 0.0) for record in records)) > _MOST_OF_OTHERS:
        pytest.skip(f"other processes took {busy:.0%} of the cores meanwhile")


@pytest.mark.parametrize(
    ("shape", "mbit", "tokens", "patterns"),
    [
        ((2, 2), 200, 1024, ("uniform", "single-node", "imbalanced", "trace")),
        ((4, 2), 200, 512, ("uniform", "imbalanced")),  # at 500 Mbit/s eight ranks fill two cores
    ],
    ids=["2x2", "4x2"],
)
def test_shuffles_take_the_time_that_is_predicted(shape, mbit, tokens, patterns):
    place = ("--testbed", f"{shape[0]}x{shape[1]}", "--rate", f"{mbit}mbit")
    sizes = ("--tokens", str(tokens), "--hidden", str(_HIDDEN), "--variants", "fusco,no-lanes")
    records = bench("shuffle", *place, *sizes, "--traffic", ",".join(patterns))
    assert {record["traffic"] for record in records} == set(patterns)
    skip_if_busy(records)
    wrong = []
    for record in records:
        times = predicted(shape, mbit, record["traffic"], tokens)
        for call in ("dispatch", "combine"):
            expected, measured = times[record["variant"], call], record[f"{call}_ms"]
            if abs(expected / measured - 1) > _WITHIN:
                wrong.append(f"{record['traffic']}, {record['variant']}, {call}: {expected:.1f} for {measured:.1f} ms")
    assert not wrong


def test_all_to_alls_take_the_time_that_is_predicted():
    sizes = ("--matrix", "uniform,zipf", "--bytes-per-rank", "8000000")
    records = bench("alltoall", "--testbed", "2x2", "--rate", "200mbit", *sizes)
    cluster = load_cluster("testbed").with_values("the rate that is set", nic_gbs=0.025 * _HEADERS)
    skip_if_busy(records)
    for record in records:
        matrix = make_rank_bytes(record["matrix"], 4, record["bytes_per_rank"], record["skew"], record["seed"])
        demand = Demand.of_matrix(record["matrix"], matrix, cluster.topology)
        assert simulate(cluster, demand, "fast").makespan_ms == pytest.approx(record["fusco_ms"], rel=_WITHIN)

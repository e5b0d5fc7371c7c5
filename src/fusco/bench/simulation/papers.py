"""Published results, and our own on 4 GPUs, beside predictions: ``fusco simulate --check papers``.

``papers.json`` has results of FUSCO, FAST and FuseLink as published, and of our runs, with their role: rows that
constants were trained on, rows that are held out, rows that no constant explains. ``residuals.json`` has the errors
when this was last committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from statistics import median
from typing import Any

import numpy as np

from fusco.bench.inputs.traffic import Trace, Workload
from fusco.bench.simulation.laws import demand_of, grouped_gate, imbalanced
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.schedule import lower_bound_bytes, make_schedule, schedule_us
from fusco.simulate.cluster import Cluster, load_cluster
from fusco.simulate.demand import Demand
from fusco.simulate.exchanges import links_of
from fusco.simulate.flows import Hop, Program, lay_out, run
from fusco.simulate.links import LinkTable
from fusco.simulate.run import Tier, simulate

_NUM_DRAWS = 5  # of FAST's matrices; the median counts
_TOKENS, _EXPERTS, _TOPK, _ROW = 16384, 256, 8, 14336  # FUSCO, Table 2; bf16 is assumed
_BIMODAL = 0.2
_MOST_MOVED = 1.0  # points of a residual

_VARIANTS = {
    "FUSCO": "fusco-paper",
    "dComm-off": "fusco-paper-no-engine",
    "planner-off": "fusco-paper-no-planner",
    "balancer-off": "fusco-paper-no-balancer",
    "NCCL": "nccl",
    "DeepEP": "deepep",
}


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A published result and the prediction; ``error`` is relative, in percent, ``moved`` its change in points.

    ``measured`` is the published value, ``label`` names it. ``role`` is ``"train"`` (a constant was set with it),
    ``"test"`` (held out) or ``"none"`` (not explained). ``fusco explore`` shows the JSON lines.
    """

    kind: str = "prediction"  # of ``fusco explore``
    label: str
    where: str
    unit: str
    measured: float
    predicted: float
    error: float
    role: str
    moved: float

    @property
    def errors(self) -> tuple[str, ...]:
        """What is wrong: a residual that moved."""
        if abs(self.moved) <= _MOST_MOVED:
            return ()
        return (f"its error moved by {self.moved:+.1f} points, to {self.error:+.1f} %",)

    @property
    def is_right(self) -> bool:
        """Return whether the residual is where it was."""
        return not self.errors


def published_rows() -> list[dict[str, Any]]:
    """Return the rows of ``papers.json``."""
    return _read("papers.json")["results"]


def check_papers(ids: Sequence[str] = ()) -> Iterator[PaperRow]:
    """Predict all published results, or those whose id begins with one of ``ids``."""
    residuals = _read("residuals.json")
    for row in published_rows():
        if ids and not row["id"].startswith(tuple(ids)):
            continue
        predicted = _KINDS[row["kind"]](row)  # in its unit
        error = round((predicted / row["value"] - 1) * 100, 2)
        yield PaperRow(
            label=row["id"],
            where=row["where"],
            unit=row["unit"],
            measured=row["value"],
            predicted=round(predicted, 3),
            error=error,
            role=row["role"],
            moved=round(error - residuals.get(row["id"], error), 2),
        )


def _read(name: str) -> Any:
    return json.loads((resources.files("fusco.bench.simulation") / name).read_text(encoding="utf-8"))


def _fusco_ms(row: dict[str, Any]) -> float:
    """Dispatch and combine of 16,384 tokens a rank, ms; or another system's time over FUSCO's."""
    cluster, demand = load_cluster("fusco64"), _fusco_demand(row["pattern"])
    took = _both_ms(cluster, demand, _VARIANTS[row["variant"]])
    return took / _both_ms(cluster, demand, "fusco-paper") if row["unit"] == "x" else took


def _both_ms(cluster: Cluster, demand: Demand, name: str) -> float:
    return sum(simulate(cluster, demand, name, call).makespan_ms for call in ("dispatch", "combine"))


@lru_cache(maxsize=3)
def _fusco_demand(pattern: str) -> Demand:
    topology = load_cluster("fusco64").topology
    sizes = (topology, _TOKENS, _EXPERTS, _TOPK)
    if pattern == "imbalanced":
        share = np.random.default_rng(0).beta(_BIMODAL, _BIMODAL, topology.world_size)
        ids = imbalanced(*sizes, share)
    else:  # a gate of DeepSeek-V3 chooses 4 of 8 groups
        ids = grouped_gate(*sizes, groups_of_token=1 if pattern == "single-node" else 4)
    placement = ExpertPlacement.contiguous(_EXPERTS, topology.world_size)
    return Demand.of_routing(pattern, ids, placement, topology, _ROW)


def _shuffle_ms(row: dict[str, Any]) -> float:
    """One call of fusco on 4 GPUs, ms; ``values`` are constants that a run has for itself."""
    nodes, ranks_per_node = row["shape"]
    cluster = load_cluster(row["cluster"]).resized(nodes, ranks_per_node)
    cluster = cluster.with_values("of the run", **row.get("values", {}))
    sizes = {name: row[name] for name in ("pattern", "tokens", "hidden")}
    workload = Workload(
        **sizes,
        topology=cluster.topology,
        placement=ExpertPlacement.contiguous(row["experts"], cluster.topology.world_size),
        num_topk=row["topk"],
        trace=Trace.load(None, None, 0) if row["pattern"] == "trace" else None,
    )
    return simulate(cluster, demand_of(workload), "no-lanes", row["call"]).makespan_ms


def _relayed_gbs(row: dict[str, Any]) -> float:
    """FuseLink's bandwidth between two GPUs, GB/s: over some NICs of their hosts, all but one behind NVLink."""
    table, number = LinkTable(load_cluster("fuselink")), np.arange(row["nics"])
    src, there = np.zeros_like(number), table.topology.ranks_per_node + number
    size = np.full(len(number), 10**9)
    hop = Hop(name="relayed", kind="between", src=src, dst=src + there[0], num_bytes=size, via=number, until=there)
    outcome = run(lay_out(Program(hops=(hop,)), table), table)
    return float(outcome.samples[0, table.slice_of("nic-out")].sum() / outcome.sample_us / 1e3)


def fast_matrix(entries: str, num_ranks: int, mb_per_rank: float, skew: float, seed: int) -> IntArray:
    """Return bytes from rank to rank as FAST draws them: equal; uniform in 0..1023; or 1..1024 with Zipf's law."""
    random, shape = np.random.default_rng(seed), (num_ranks, num_ranks)
    if entries == "balanced":
        matrix = np.ones(shape)
    elif entries == "random":
        matrix = random.integers(0, 1024, shape).astype(np.float64)
    else:
        values = np.arange(1, 1025)
        weights = values.astype(np.float64) ** -skew
        matrix = random.choice(values, shape, p=weights / weights.sum()).astype(np.float64)
    np.fill_diagonal(matrix, 0)
    return np.rint(matrix * (mb_per_rank * 1e6 * num_ranks / matrix.sum())).astype(np.int64)


def _fast_gbs(row: dict[str, Any]) -> float:
    """Algorithmic bandwidth: mean bytes of a rank over the time, GB/s; or FAST's over another's."""
    times = [_fast_ms(row, row["system"], seed) for seed in range(_NUM_DRAWS)]
    if row["unit"] == "x":
        return median(took / _fast_ms(row, "fast", seed) for seed, took in enumerate(times))
    return float(row["mb"]) / median(times)


def _fast_ms(row: dict[str, Any], name: str, seed: int) -> float:
    cluster = load_cluster(row["cluster"])
    topology = cluster.topology
    matrix = fast_matrix(row["entries"], topology.world_size, row["mb"], row.get("skew", 0.0), seed)
    if name == "fast":
        return schedule_us(make_schedule(matrix, topology), links_of(cluster)) / 1e3
    tier: Tier = "bound" if name in ("nccl", "deepep", "padded") else "fluid"
    system = {"nccl": "direct-pxn", "deepep": "no-balancer"}.get(name, name)
    return simulate(cluster, Demand.of_matrix("FAST", matrix, topology), system, "dispatch", tier).makespan_ms


def _over_bound(row: dict[str, Any]) -> float:
    """FAST's time over the bound of the busiest node, in its own simulator (Fig. 17a), as a ratio."""
    cluster = load_cluster("fast-sim").resized(row["ranks"] // 8)
    links, topology, ratios = links_of(cluster), cluster.topology, []
    for seed in range(2):
        matrix = fast_matrix("random", row["ranks"], 50.0 * (row["ranks"] - 1), 0.0, seed)
        node_bytes = matrix.reshape(cluster.nodes, 8, cluster.nodes, 8).sum(axis=(1, 3))
        bound_us = links.internode_us(lower_bound_bytes(node_bytes) / 8)
        ratios.append(schedule_us(make_schedule(matrix, topology), links) / bound_us)
    return median(ratios)


def _worst_case(row: dict[str, Any]) -> float:
    """FAST's appendix A.1: the worst case over the optimum for nodes of ``m`` GPUs and bandwidths ``r`` to 1."""
    nodes, ratio, local = row["nodes"], row["ratio"], 8
    return float(1 + (local + local / nodes) / ratio)


_KINDS: dict[str, Callable[[dict[str, Any]], float]] = {
    "fusco": _fusco_ms,
    "shuffle": _shuffle_ms,
    "relayed": _relayed_gbs,
    "fast": _fast_gbs,
    "over-bound": _over_bound,
    "worst-case": _worst_case,
}

"""Which part of fusco brings what on a cluster: times with each part and without, what replicas cost and save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusco.core.balance import Balance
from fusco.placement import plan_batch
from fusco.simulate.cluster import DEFAULT_SOURCE, Cluster
from fusco.simulate.demand import Demand
from fusco.simulate.result import SimulationResult
from fusco.simulate.run import Tier, simulate

# A part of fusco, the system without it, the system with it.
PARTS = (
    ("deduplication: one copy for each node", "no-planner", "no-lanes"),
    ("no passes over memory, pipelined", "no-engine", "no-lanes"),
    ("balancer of who forwards", "no-balancer", "no-lanes"),
    ("lanes: ranks send for each other", "no-lanes", "fusco"),
    ("stages, for the same bytes as all_to_all", "direct", "fast"),
)
_MOSTLY = 0.5  # of the time: below that, what binds is no link


@dataclass(frozen=True, kw_only=True)
class PartGain:
    """Dispatch and combine without a part and with it, ms; ``gain`` is their ratio."""

    part: str
    without_ms: float
    with_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast it is with the part."""
        return self.without_ms / self.with_ms if self.with_ms else 1.0


@dataclass(frozen=True, kw_only=True)
class ReplicaGain:
    """Copies of busy experts: what they spare the busiest rank, and the weights that they move.

    ``break_even_tokens`` are the tokens of all ranks from which on a copy that nothing hides saves more than it takes;
    ``None`` if copies save nothing. ``within_node`` says over which links weights travel.
    """

    spare_places: int
    num_copies: int
    busiest_over_mean_before: float
    busiest_over_mean: float
    saved_ms: float
    weights_ms: float
    within_node: bool
    break_even_tokens: int | None


def gains_of_parts(cluster: Cluster, demand: Demand, tier: Tier = "fluid") -> Iterator[PartGain]:
    """Simulate dispatch and combine with and without each part of fusco, and with a second NIC for each rank.

    Parts that a tier cannot tell are left out: what stages bring by bounds of links, which are the same without, and
    deduplication of more ranks than have a matrix.
    """
    times: dict[str, float] = {}

    def both_ms(of: Cluster, name: str) -> float:
        return sum(simulate(of, demand, name, call, tier).makespan_ms for call in ("dispatch", "combine"))

    for part, *systems in PARTS:
        if (tier == "bound" and "fast" in systems) or ("no-planner" in systems and not demand.has_matrix):
            continue
        for name in systems:
            if name not in times:
                times[name] = both_ms(cluster, name)
        yield PartGain(part=part, without_ms=times[systems[0]], with_ms=times[systems[1]])
    doubled = cluster.with_values("two rails for each rank", nic_gbs=2 * cluster.nic_gbs)
    part = "rails: a second NIC for each rank"
    yield PartGain(part=part, without_ms=times["fusco"], with_ms=both_ms(doubled, "fusco"))


def gain_of_replicas(cluster: Cluster, demand: Demand, expert_bytes: int, spare_places: int = 1) -> ReplicaGain | None:
    """Plan copies of busy experts as ``fusco.placement`` does; ``None`` if the rows of experts are not known.

    An expert's rows take ``row_us`` of the cluster each. Rows travel as without copies, which is not exact.
    """
    if not len(demand.expert_rows) or not demand.expert_rows.sum():
        return None
    topology = demand.topology
    balance, shape = Balance(spare_places=spare_places), (topology.world_size, topology.ranks_per_node)
    plan = plan_batch(demand.expert_rows, demand.expert_to_rank, shape[0], balance, shape[1])
    nodes = np.array(topology.rank_to_node)
    home = demand.expert_to_rank[plan.experts]
    is_within = bool((nodes[home] == nodes[plan.ranks]).all())
    rate = cluster.nvl_gbs if is_within else cluster.nic_gbs
    moved = np.concatenate((np.bincount(plan.ranks, minlength=shape[0]), np.bincount(home, minlength=shape[0])))
    weights_us = int(moved.max(initial=0)) * expert_bytes / rate / 1e3
    return ReplicaGain(
        spare_places=spare_places,
        num_copies=len(plan.ranks),
        busiest_over_mean_before=plan.busiest_over_mean_before,
        busiest_over_mean=plan.busiest_over_mean,
        saved_ms=plan.spared_rows * cluster.row_us / 1e3,
        weights_ms=weights_us / 1e3,
        within_node=is_within,
        break_even_tokens=plan.break_even_tokens(int(demand.num_tokens.sum()), weights_us, cluster.row_us),
    )


def describe_binding(result: SimulationResult) -> str:
    """Return which link binds, on which side and for how much of the time: ``"nic-in of rank 8"`` is a receiver's.

    Where no link is busy for half of the time, none binds.
    """
    kind, _, owner = result.binds.partition(" of ")
    what, _, way = kind.partition("-")
    names = {
        "nic": "network",
        "nvl": "links within a node",
        "rail": "links between rails",
        "leaf": "spine",
        "cores": "processors",
    }
    side = {"out": ["as sender"], "in": ["as receiver"], "up": ["as sender"], "down": ["as receiver"]}.get(way, [])
    node = [f"node {int(owner[5:]) // result.ranks_per_node}"] if owner.startswith("rank ") else []
    link = f"{result.binds} ({', '.join([*node, names.get(what, what), *side])})"
    share = result.bound_ms / result.makespan_ms if result.makespan_ms else 0.0
    part = f"{100 * share:.0f} % of the time"
    if share < _MOSTLY:
        return f"no link, but start, latencies and waiting; the busiest link, {link}, needs {part}"
    return f"{link}, busy for {part}"


def defaults_used(result: SimulationResult) -> list[str]:
    """Return the constants that the cluster's file lacks, with the values that were taken instead."""
    return [f"{each.name} {each.value:g}" for each in result.constants if each.source == DEFAULT_SOURCE]

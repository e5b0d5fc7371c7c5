"""One plan in numbers, as ``fusco plan`` prints it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.api.memory_size import memory_size_hint
from fusco.bench.traffic import Workload
from fusco.core.config import Capacity
from fusco.core.lanes import Lanes
from fusco.planner.balancer import BALANCERS, balance_static
from fusco.planner.cost import plan_cost
from fusco.planner.traffic import Traffic
from fusco.planner.world import plan_world, traffic_of


@dataclass(frozen=True)
class RankRows:
    """Rows that one rank sends and receives between nodes; ``plain``: if ranks with equal local ranks do it."""

    rank: int
    node: int
    plain_sends: int
    plain_receives: int
    sends: int
    receives: int


@dataclass(frozen=True)
class Balance:
    """Imbalance that a balancer leaves: the busiest rank over the bound, so 1.0 is perfect, and the rows it moves."""

    send_ratio: float
    receive_ratio: float
    moved_rows: int


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan for all ranks. Rows and bytes are of one dispatch, bytes summed over ranks.

    ``bound_rows`` are those of a rank of the busiest node, if its ranks send and receive equally many.
    """

    traffic: str
    nodes: int
    ranks_per_node: int
    tokens: int
    num_experts: int
    num_topk: int
    bytes_per_token: int
    balancer: str
    node_to_node_rows: list[list[int]]
    ranks: list[RankRows]
    bound_rows: float
    balance: dict[str, Balance]
    internode_bytes: int
    internode_bytes_avoided: int
    lane_bytes: int
    intranode_bytes: int
    metadata_bytes: int
    shared_memory_bytes: int
    private_memory_bytes: int


def explain(workload: Workload, balancer: str) -> PlanRecord:
    """Plan a workload for all ranks and return the figures of the plan."""
    topology = workload.topology
    routings = [workload.routing(rank) for rank in range(topology.world_size)]
    plans = plan_world(routings, workload.placement, topology, BALANCERS[balancer])
    traffic = traffic_of([plan.forwarding for plan in plans], topology)
    plain, lanes = traffic.lanes_of(balance_static(traffic)), plans[0].lanes
    costs = [plan_cost(plan, workload.bytes_per_token) for plan in plans]
    sizes = {"max_tokens_per_rank": workload.tokens, "max_bytes_per_token": workload.bytes_per_token}
    memory = memory_size_hint(topology, Capacity(**sizes, num_topk=workload.num_topk))
    rows = np.stack([plain.sent_rows, plain.received_rows, lanes.sent_rows, lanes.received_rows], 1).tolist()
    return PlanRecord(
        traffic=workload.pattern.value,
        nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        tokens=workload.tokens,
        num_experts=workload.placement.num_experts,
        num_topk=workload.num_topk,
        bytes_per_token=workload.bytes_per_token,
        balancer=balancer,
        node_to_node_rows=traffic.num_rows.sum(axis=1).tolist(),
        ranks=[RankRows(rank, node, *rows[rank]) for rank, node in enumerate(topology.rank_to_node)],
        bound_rows=round(traffic.bound, 1),
        balance={name: balance_of(traffic, traffic.lanes_of(balance(traffic))) for name, balance in BALANCERS.items()},
        internode_bytes=sum(cost.internode_send_bytes for cost in costs),
        internode_bytes_avoided=sum(cost.internode_bytes_avoided for cost in costs),
        lane_bytes=sum(cost.lane_bytes for cost in costs),
        intranode_bytes=sum(cost.intranode_bytes for cost in costs),
        metadata_bytes=sum(cost.metadata_bytes for cost in costs),
        shared_memory_bytes=memory.shared_bytes,
        private_memory_bytes=memory.private_bytes,
    )


def balance_of(traffic: Traffic, lanes: Lanes) -> Balance:
    """Return how close the busiest rank is to the bound."""
    bound = traffic.bound or 1.0
    sent, received = (float(rows.max() / bound) for rows in (lanes.sent_rows, lanes.received_rows))
    return Balance(sent, received, lanes.num_moved)

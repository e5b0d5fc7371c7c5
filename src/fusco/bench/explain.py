"""One plan in numbers, as ``fusco plan`` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.api.memory_size import memory_size_hint
from fusco.bench.traffic import Workload
from fusco.core.config import Capacity
from fusco.planner.balancer import BALANCERS, IntArray
from fusco.planner.cost import plan_cost
from fusco.planner.world import plan_world, traffic_of


@dataclass(frozen=True)
class RankRows:
    """Rows that one rank sends and receives between nodes."""

    rank: int
    node: int
    group: int
    sends: int
    receives: int


@dataclass(frozen=True)
class Balance:
    """Imbalance that a balancer leaves: largest over mean, so 1.0 is perfect."""

    group_load_ratio: float
    receive_ratio: float


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan for all ranks. Rows and bytes are of one dispatch, bytes summed over ranks."""

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
    groups: list[list[int]]
    group_loads: list[int]
    balance: dict[str, Balance]
    internode_bytes: int
    internode_bytes_avoided: int
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
    groups = plans[0].groups
    costs = [plan_cost(plan, workload.bytes_per_token) for plan in plans]
    memory = memory_size_hint(
        topology,
        Capacity(
            max_tokens_per_rank=workload.tokens,
            max_bytes_per_token=workload.bytes_per_token,
            num_topk=workload.num_topk,
        ),
    )
    received = traffic.received_rows(groups)
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
        ranks=[
            RankRows(
                rank=rank,
                node=node,
                group=groups.rank_to_group[rank],
                sends=int(traffic.rank_loads[node, topology.rank_to_local[rank]]),
                receives=int(received[groups.rank_to_group[rank], node]),
            )
            for rank, node in enumerate(topology.rank_to_node)
        ],
        groups=[
            [topology.node_to_ranks[node][local] for node, local in enumerate(members)]
            for members in groups.group_to_locals
        ],
        group_loads=traffic.group_loads(groups).tolist(),
        balance={
            name: Balance(_ratio(traffic.group_loads(result)), _ratio(traffic.received_rows(result)))
            for name, result in ((name, balance(traffic)) for name, balance in BALANCERS.items())
        },
        internode_bytes=sum(cost.internode_send_bytes for cost in costs),
        internode_bytes_avoided=sum(cost.internode_bytes_avoided for cost in costs),
        intranode_bytes=sum(cost.intranode_bytes for cost in costs),
        metadata_bytes=sum(cost.metadata_bytes for cost in costs),
        shared_memory_bytes=memory.shared_bytes,
        private_memory_bytes=memory.private_bytes,
    )


def _ratio(loads: IntArray) -> float:
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0

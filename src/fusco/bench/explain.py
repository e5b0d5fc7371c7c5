"""One plan in numbers, of a dispatch or of a ``shuffle`` of segments, as ``fusco plan`` prints it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusco.api.memory_size import memory_size_hint
from fusco.bench.balance import BalancedBatch, balance_batch
from fusco.bench.harness.environment import record_of
from fusco.bench.inputs.traffic import Workload
from fusco.core.config import Capacity
from fusco.core.lanes import IntArray, Lanes
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.plan import CpuPlan
from fusco.planner.balancer import BALANCERS, Balancer, balance_static
from fusco.planner.dispatch_plan import NodeForwarding, NodeRouting, select_tokens
from fusco.planner.rank_lanes import RankLanes
from fusco.planner.routing import Routing, routing_bytes_per_row
from fusco.planner.traffic import Traffic
from fusco.schedule.cost import CPU_LINKS, are_lanes_worth_it, schedule_for
from fusco.schedule.stages import lower_bound_bytes


@dataclass(frozen=True)
class RankLoad:
    """Rows or bytes that one rank sends and receives between nodes.

    ``plain`` of a dispatch: if ranks with equal local ranks do it; of a shuffle: if every rank sends its segments.
    """

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
    ranks: list[RankLoad]
    bound_rows: float
    balance: dict[str, Balance]
    internode_bytes: int
    internode_bytes_avoided: int
    lane_bytes: int
    intranode_bytes: int
    metadata_bytes: int
    shared_memory_bytes: int
    private_memory_bytes: int
    balanced_batch: BalancedBatch | None


_SUMMED = ("internode_bytes_avoided", "lane_bytes", "intranode_bytes", "metadata_bytes")


def explain(workload: Workload, balancer: str, spare_places: int | None = None) -> PlanRecord:
    """Plan a workload for all ranks and return the figures of the plan.

    With ``spare_places`` on each rank for copies of busy experts, also which would be copied for this batch.
    """
    topology = workload.topology
    routings = [workload.routing(rank) for rank in range(topology.world_size)]
    plans = plan_world(routings, workload.placement, topology, BALANCERS[balancer])
    traffic = traffic_of([plan.forwarding for plan in plans], topology)
    plain, lanes = traffic.lanes_of(balance_static(traffic)), plans[0].lanes
    costs = [plan_cost(plan, workload.bytes_per_token) for plan in plans]
    sizes = {"max_tokens_per_rank": workload.tokens, "max_bytes_per_token": workload.bytes_per_token}
    memory = memory_size_hint(topology, Capacity(**sizes, num_topk=workload.num_topk))
    rows = np.stack([plain.sent_rows, plain.received_rows, lanes.sent_rows, lanes.received_rows], 1).tolist()
    return record_of(
        PlanRecord,
        workload,
        workload.placement,
        topology,
        traffic=workload.pattern,
        nodes=topology.num_nodes,
        balancer=balancer,
        node_to_node_rows=traffic.num_rows.sum(axis=1).tolist(),
        ranks=[RankLoad(rank, node, *rows[rank]) for rank, node in enumerate(topology.rank_to_node)],
        bound_rows=round(traffic.bound, 1),
        balance={name: balance_of(traffic, traffic.lanes_of(balance(traffic))) for name, balance in BALANCERS.items()},
        internode_bytes=sum(cost.internode_send_bytes for cost in costs),
        **{name: sum(getattr(cost, name) for cost in costs) for name in _SUMMED},
        shared_memory_bytes=memory.shared_bytes,
        private_memory_bytes=memory.private_bytes,
        balanced_batch=None if spare_places is None else balance_batch(workload, spare_places),
    )


def balance_of(traffic: Traffic, lanes: Lanes) -> Balance:
    """Return how close the busiest rank is to the bound."""
    bound = traffic.bound or 1.0
    sent, received = (float(rows.max() / bound) for rows in (lanes.sent_rows, lanes.received_rows))
    return Balance(sent, received, lanes.num_moved)


@dataclass(frozen=True)
class CarriedBytes:
    """Bytes of a rank for another node that a rank of its own node sends."""

    carrier: int
    rank: int
    to_node: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ShuffleRecord:
    """A shuffle for all ranks. ``bound_bytes`` are those of a rank of the busiest node, if its ranks share them evenly.

    Without lanes (``has_lanes``) every rank sends its segments itself. ``handed_on_bytes`` arrive at another rank than
    their destination and cross its node once more, as ``carried`` do before they are sent.
    """

    matrix: str
    nodes: int
    ranks_per_node: int
    slice_bytes: int
    has_lanes: bool
    bound_bytes: int
    ranks: list[RankLoad]
    carried: list[CarriedBytes]
    handed_on_bytes: int


def explain_shuffle(matrix: str, rank_bytes: IntArray, topology: Topology, slice_bytes: int) -> ShuffleRecord:
    """Plan a shuffle on the CPU in which rank ``i`` has ``rank_bytes[i, j]`` for rank ``j``, and return its figures.

    Rank 0 has 8 MB for node 1, and rank 1 sends half of them:

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> rank_bytes = np.array([[0, 0, 4, 4], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]) * 10**6
    >>> explain_shuffle("example", rank_bytes, topology, slice_bytes=10**6).carried
    [CarriedBytes(carrier=1, rank=0, to_node=1, num_bytes=4000000)]
    """
    nodes = np.array(topology.rank_to_node)
    is_node = np.eye(topology.num_nodes, dtype=np.int64)[nodes]
    crossing = np.where(nodes[:, None] != nodes, rank_bytes, 0)
    has_lanes = are_lanes_worth_it(rank_bytes, topology, slice_bytes)
    plain = loads = np.stack((crossing.sum(axis=1), crossing.sum(axis=0)))
    carried: Counter[tuple[int, int, int]] = Counter()  # by carrier, rank and node
    handed_on = 0
    if has_lanes:
        schedule = schedule_for(crossing, topology, CPU_LINKS)
        sent = schedule.internode
        loads, handed_on = sent.load(topology.world_size), int(schedule.redistribution.num_bytes.sum())
        of_others = sent.select(sent.from_rank != sent.src_rank)
        columns = (of_others.from_rank, of_others.src_rank, nodes[of_others.dst_rank], of_others.num_bytes)
        for carrier, rank, node, size in np.stack(columns, axis=1).tolist():
            carried[carrier, rank, node] += size
    return ShuffleRecord(
        matrix=matrix,
        nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        slice_bytes=slice_bytes,
        has_lanes=has_lanes,
        bound_bytes=-(-lower_bound_bytes(is_node.T @ crossing @ is_node) // topology.ranks_per_node),
        ranks=[
            RankLoad(rank, node, *plain[:, rank].tolist(), *loads[:, rank].tolist())
            for rank, node in enumerate(topology.rank_to_node)
        ],
        carried=[CarriedBytes(*ends, size) for ends, size in sorted(carried.items())],
        handed_on_bytes=handed_on,
    )


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Bytes of one rank in a dispatch; combine moves the same rows in the other direction."""

    internode_send_bytes: int  # rows that it sends to other nodes, also those of other ranks that it carries
    lane_bytes: int  # rows that it reads from the pools of other ranks of its node to send them to other nodes
    intranode_bytes: int  # rows that it reads from the pools of other ranks of its node, each once
    metadata_bytes: int  # routing (expert ids and weights) that it sends to other nodes
    internode_bytes_avoided: int  # additional bytes to other nodes if there were one copy for each (token, expert)


def plan_world(
    routings: Sequence[Routing],
    placement: ExpertPlacement,
    topology: Topology,
    balancer: Balancer,
    expert_alignment: int = 1,
) -> tuple[CpuPlan, ...]:
    """Plan for every rank, as the ranks themselves would after exchanging their routing.

    ``routings[r]`` is the routing of rank ``r``; all must have the same ``num_topk``.
    """
    forwardings = [select_tokens(routing.topk_idx, placement, topology) for routing in routings]
    traffic = traffic_of(forwardings, topology)
    lanes = traffic.lanes_of(balancer(traffic))
    nodes = [_routing_on_node(routings, forwardings, node, topology) for node in range(topology.num_nodes)]
    plans = []
    for rank, node in enumerate(topology.rank_to_node):
        pairs = plan_pairs(nodes[node], placement, rank, topology.locals_of(node), expert_alignment)
        plan = CpuPlan(
            rank=rank,
            placement=placement,
            rank_lanes=RankLanes(rank, lanes),
            forwarding=forwardings[rank],
            routing=nodes[node],
            distribution=pairs.distribution,
            pairs=pairs,
        )
        plans.append(plan)
    return tuple(plans)


def traffic_of(forwardings: Sequence[NodeForwarding], topology: Topology) -> Traffic:
    """Return the rows that each rank sends to each other node."""
    return Traffic.from_counts(topology, [forwarding.num_tokens_to_node for forwarding in forwardings])


def _routing_on_node(
    routings: Sequence[Routing], forwardings: Sequence[NodeForwarding], node: int, topology: Topology
) -> NodeRouting:
    """Return the routing on a node after the exchange: all tokens of its ranks, the forwarded ones of others."""
    parts = [
        routing if topology.rank_to_node[src] == node else _select(routing, forwarding.node_to_tokens[node])
        for src, (routing, forwarding) in enumerate(zip(routings, forwardings, strict=True))
    ]
    weights = [part.topk_weights for part in parts if part.topk_weights is not None]
    return NodeRouting(
        topk_idx=torch.cat([part.topk_idx for part in parts]),
        topk_weights=torch.cat(weights) if len(weights) == len(parts) else None,
        src_to_first_row=(0, *itertools.accumulate(part.num_tokens for part in parts)),
    )


def _select(routing: Routing, tokens: torch.Tensor) -> Routing:
    weights = routing.topk_weights
    return Routing(routing.topk_idx[tokens], None if weights is None else weights[tokens])


def plan_cost(plan: CpuPlan, bytes_per_token: int) -> PlanCost:
    """Count the bytes that ``plan`` moves if a token's row has ``bytes_per_token`` bytes."""
    topology, lanes = plan.topology, plan.rank_lanes
    carried, incoming = lanes.carried, lanes.incoming

    is_read = plan.pairs.row_to_locals[:, topology.rank_to_local[plan.rank]]
    read_before = np.append(0, is_read.numpy().cumsum())
    first_row = np.array(plan.routing.src_to_first_row)
    neighbours = np.array(topology.node_to_ranks[plan.node])
    rows_of_neighbours = read_before[first_row[neighbours + 1]] - read_before[first_row[neighbours]]
    rows_of_runs = (
        read_before[first_row[incoming.src] + incoming.end] - read_before[first_row[incoming.src] + incoming.first]
    )
    num_local = rows_of_neighbours[neighbours == plan.rank].sum() + rows_of_runs[incoming.forwarder == plan.rank].sum()

    first, end = plan.routing.src_to_first_row[plan.rank : plan.rank + 2]
    topk_idx = plan.routing.topk_idx[first:end]
    expert_to_node = plan.placement.membership_table(topology.rank_to_node, topk_idx.device)
    dst_node = expert_to_node[topk_idx.long()]
    num_sent = int(lanes.own.num_rows.sum())
    num_remote_pairs = int(((dst_node >= 0) & (dst_node != plan.node)).sum())

    weights = plan.routing.topk_weights
    routing_bytes = routing_bytes_per_row(plan.num_topk, 0 if weights is None else weights.element_size())
    return PlanCost(
        internode_send_bytes=int(carried.num_rows.sum()) * bytes_per_token,
        lane_bytes=int(carried.num_rows[carried.src != plan.rank].sum()) * bytes_per_token,
        intranode_bytes=int(read_before[-1] - num_local) * bytes_per_token,
        metadata_bytes=num_sent * routing_bytes,
        internode_bytes_avoided=(num_remote_pairs - num_sent) * bytes_per_token,
    )

"""Plans of all ranks at once, by the functions that ranks on the CPU run, and the bytes that a plan moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.plan import CpuPlan
from fusco.planner.balancer import Balancer
from fusco.planner.distribution import NodeRouting
from fusco.planner.forwarding import NodeForwarding, select_tokens
from fusco.planner.rank_lanes import RankLanes
from fusco.planner.routing import Routing, routing_bytes_per_row
from fusco.planner.traffic import Traffic


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

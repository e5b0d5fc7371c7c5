"""Plans of all ranks at once, from the routing of all ranks: for explanation, tests and what-if questions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import Balancer
from fusco.planner.dispatch_plan import DispatchPlan
from fusco.planner.distribution import NodeRouting, distribute
from fusco.planner.forwarding import NodeForwarding, plan_forwarding
from fusco.planner.rank_lanes import RankLanes
from fusco.planner.routing import Routing
from fusco.planner.traffic import Traffic


def traffic_of(forwardings: Sequence[NodeForwarding], topology: Topology) -> Traffic:
    """Return the rows that each rank sends to each other node, int64 (num_nodes, ranks_per_node, num_nodes)."""
    return Traffic.from_counts(topology, [forwarding.num_tokens_to_node for forwarding in forwardings])


def node_routing(
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


def plan_world(
    routings: Sequence[Routing],
    placement: ExpertPlacement,
    topology: Topology,
    balancer: Balancer,
    expert_alignment: int = 1,
) -> tuple[DispatchPlan, ...]:
    """Plan for every rank, as the ranks themselves would after exchanging their routing.

    ``routings[r]`` is the routing of rank ``r``; all must have the same ``num_topk``.
    """
    forwardings = [plan_forwarding(routing.topk_idx, placement, topology) for routing in routings]
    traffic = traffic_of(forwardings, topology)
    lanes = traffic.lanes_of(balancer(traffic))
    nodes = [node_routing(routings, forwardings, node, topology) for node in range(topology.num_nodes)]
    plans = []
    for rank, node in enumerate(topology.rank_to_node):
        plan = DispatchPlan(
            rank=rank,
            placement=placement,
            rank_lanes=RankLanes(rank, lanes),
            forwarding=forwardings[rank],
            routing=nodes[node],
            distribution=distribute(nodes[node], placement, rank, expert_alignment),
        )
        plans.append(plan)
    return tuple(plans)

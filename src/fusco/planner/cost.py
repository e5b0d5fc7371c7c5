"""Bytes that a plan moves, by kind of link."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.planner.dispatch_plan import DispatchPlan
from fusco.planner.distribution import mark_local_ranks


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Bytes of one rank in a dispatch; combine moves the same rows in the other direction.

    Attributes:
        internode_send_bytes: rows that it sends to other nodes, one copy for each token and node.
        internode_recv_bytes: rows that it receives for its node as a forwarder.
        intranode_bytes: rows that it reads from the pools of other ranks of its node, each once.
        local_bytes: rows that it reads from its pool, each once.
        output_bytes: rows that it writes, expert-major; one for each token and expert.
        metadata_bytes: routing (expert ids and weights) that it sends to other nodes.
        internode_bytes_avoided: additional bytes to other nodes if there were one copy for each (token, expert).
    """

    internode_send_bytes: int
    internode_recv_bytes: int
    intranode_bytes: int
    local_bytes: int
    output_bytes: int
    metadata_bytes: int
    internode_bytes_avoided: int


def routing_bytes_per_row(num_topk: int, weight_bytes: int) -> int:
    """Return the bytes of routing that are sent for one row: an int32 id and a weight for each of its experts."""
    return num_topk * (4 + weight_bytes)


def plan_cost(plan: DispatchPlan, bytes_per_token: int) -> PlanCost:
    """Count the bytes that ``plan`` moves if a token's row has ``bytes_per_token`` bytes."""
    topology, distribution = plan.topology, plan.distribution
    num_sent = sum(plan.forwarding.num_tokens_to_node[node] for node in topology.remote_nodes(plan.rank))
    num_received = sum(plan.num_rows_from(src) for src in plan.sources_held_by(plan.rank) if src != plan.rank)

    num_pulled = num_local = 0
    touched = mark_local_ranks(plan.routing, plan.placement, topology, plan.node)[:, topology.rank_to_local[plan.rank]]
    for src, holder in enumerate(plan.src_to_holder):
        first, end = plan.routing.src_to_first_row[src : src + 2]
        num_touched = int(touched[first:end].sum())
        if holder == plan.rank:
            num_local += num_touched
        else:
            num_pulled += num_touched

    first, end = plan.routing.src_to_first_row[plan.rank : plan.rank + 2]
    topk_idx = plan.routing.topk_idx[first:end]
    expert_to_node = plan.placement.membership_table(topology.rank_to_node, topk_idx.device)
    dst_node = expert_to_node[topk_idx.long()]
    num_remote_pairs = int(((dst_node >= 0) & (dst_node != plan.node)).sum())

    weights = plan.routing.topk_weights
    routing_bytes = routing_bytes_per_row(
        plan.routing.topk_idx.shape[1], 0 if weights is None else weights.element_size()
    )
    return PlanCost(
        internode_send_bytes=num_sent * bytes_per_token,
        internode_recv_bytes=num_received * bytes_per_token,
        intranode_bytes=num_pulled * bytes_per_token,
        local_bytes=num_local * bytes_per_token,
        output_bytes=len(distribution.pair_to_slot) * bytes_per_token,
        metadata_bytes=num_sent * routing_bytes,
        internode_bytes_avoided=(num_remote_pairs - num_sent) * bytes_per_token,
    )

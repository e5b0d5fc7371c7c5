"""Bytes that a plan moves, by kind of link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.planner.dispatch_plan import DispatchPlan
from fusco.planner.distribution import mark_local_ranks


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Bytes of one rank in a dispatch; combine moves the same rows in the other direction."""

    internode_send_bytes: int  # rows that it sends to other nodes, also those of other ranks that it carries
    lane_bytes: int  # rows that it reads from the pools of other ranks of its node to send them to other nodes
    intranode_bytes: int  # rows that it reads from the pools of other ranks of its node, each once
    metadata_bytes: int  # routing (expert ids and weights) that it sends to other nodes
    internode_bytes_avoided: int  # additional bytes to other nodes if there were one copy for each (token, expert)


def routing_bytes_per_row(num_topk: int, weight_bytes: int) -> int:
    """Return the bytes of routing that are sent for one row: an int32 id and a weight for each of its experts."""
    return num_topk * (4 + weight_bytes)


def plan_cost(plan: DispatchPlan, bytes_per_token: int) -> PlanCost:
    """Count the bytes that ``plan`` moves if a token's row has ``bytes_per_token`` bytes."""
    topology, lanes = plan.topology, plan.rank_lanes
    carried, incoming = lanes.carried, lanes.incoming

    touched = mark_local_ranks(plan.routing, plan.placement, topology, plan.node)[:, topology.rank_to_local[plan.rank]]
    touched_before = np.append(0, touched.cpu().numpy().cumsum())
    first_row = np.array(plan.routing.src_to_first_row)
    neighbours = np.array(topology.node_to_ranks[plan.node])
    rows_of_neighbours = touched_before[first_row[neighbours + 1]] - touched_before[first_row[neighbours]]
    rows_of_runs = (
        touched_before[first_row[incoming.src] + incoming.end]
        - touched_before[first_row[incoming.src] + incoming.first]
    )
    num_local = rows_of_neighbours[neighbours == plan.rank].sum() + rows_of_runs[incoming.forwarder == plan.rank].sum()
    num_pulled = touched_before[-1] - num_local

    first, end = plan.routing.src_to_first_row[plan.rank : plan.rank + 2]
    topk_idx = plan.routing.topk_idx[first:end]
    expert_to_node = plan.placement.membership_table(topology.rank_to_node, topk_idx.device)
    dst_node = expert_to_node[topk_idx.long()]
    num_sent = int(lanes.own.num_rows.sum())
    num_remote_pairs = int(((dst_node >= 0) & (dst_node != plan.node)).sum())

    weights = plan.routing.topk_weights
    routing_bytes = routing_bytes_per_row(
        plan.routing.topk_idx.shape[1], 0 if weights is None else weights.element_size()
    )
    return PlanCost(
        internode_send_bytes=int(carried.num_rows.sum()) * bytes_per_token,
        lane_bytes=int(carried.num_rows[carried.src != plan.rank].sum()) * bytes_per_token,
        intranode_bytes=int(num_pulled) * bytes_per_token,
        metadata_bytes=num_sent * routing_bytes,
        internode_bytes_avoided=(num_remote_pairs - num_sent) * bytes_per_token,
    )

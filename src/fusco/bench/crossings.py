"""What each way to shuffle must send between nodes, computed from the routing of all ranks."""

from __future__ import annotations

import numpy as np

from fusco.bench.no_planner import expand
from fusco.bench.rank_matrix import rows_of_routing
from fusco.bench.traffic import Workload
from fusco.planner.balancer import BALANCERS, Balancer, IntArray, Traffic
from fusco.planner.forwarding import plan_forwarding
from fusco.planner.internode import Forwarders


def crossing_rows(variant: str, workload: Workload, balancer: str) -> IntArray:
    """Rows that each rank sends to each rank of another node in a dispatch, int64 (world_size, world_size).

    A combine sends as many the other way. ``balancer`` is fusco's, a name of ``fusco.BALANCERS``; variants without it
    have their own.
    """
    if variant in ("baseline", "deep_ep"):
        node = np.array(workload.topology.rank_to_node)
        return np.where(node[:, None] != node, rows_of_routing(workload), 0)
    chosen = BALANCERS["static" if variant == "no-balancer" else balancer]
    return _forwarded(workload, chosen, is_expanded=variant == "no-planner")


def busiest_rows(crossing: IntArray) -> int:
    """The most rows that any rank sends, or that any rank receives, whichever is more.

    A rank's links carry both directions at once, so that the larger of the two bounds its time, and the busiest rank's
    bounds the time of all. A combine sends what a dispatch receives: its figure is the same.

    >>> busiest_rows(np.array([[0, 3], [5, 0]])), busiest_rows(np.array([[0, 0, 4], [0, 0, 4], [1, 0, 0]]))
    (5, 8)
    """
    return int(max(crossing.sum(axis=0).max(), crossing.sum(axis=1).max()))


def _forwarded(workload: Workload, balancer: Balancer, *, is_expanded: bool) -> IntArray:
    """By forwarders: a copy for each node that wants a token, or for each rank there if the routing is expanded."""
    topology, placement = workload.topology, workload.placement
    counts = []
    for rank in range(topology.world_size):
        routing = workload.routing(rank)
        if is_expanded:
            routing = expand(routing, placement).routing
        counts.append(plan_forwarding(routing.topk_idx, placement, topology).num_tokens_to_node)
    groups = balancer(Traffic.from_counts(topology, counts))
    crossing = np.zeros((topology.world_size, topology.world_size), np.int64)
    for src, node_to_count in enumerate(counts):
        for node, forwarder in Forwarders(src, groups).destinations:
            crossing[src, forwarder] += node_to_count[node]
    return crossing


def num_copies(workload: Workload) -> int:
    """The most tokens that any rank has if each (token, rank that wants it) is a token of its own."""
    ranks = range(workload.topology.world_size)
    return max(len(expand(workload.routing(rank), workload.placement).copy_to_token) for rank in ranks)

"""Rows that each variant must send between nodes, computed from the routing of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusco.bench.inputs.matrices import rows_of_routing
from fusco.bench.inputs.traffic import Workload
from fusco.bench.shuffle.no_planner import expand
from fusco.bench.shuffle.variants import balancer_of, has_fixed_messages, is_of_caller
from fusco.core.lanes import IntArray
from fusco.planner.balancer import BALANCERS
from fusco.planner.forwarding import select_tokens
from fusco.planner.traffic import Traffic


def internode_rows(variant: str, workload: Workload, balancer: str, device: str = "cpu") -> IntArray:
    """Return the rows that each rank sends to each rank of another node in a dispatch, int64 (world_size, world_size).

    A combine sends as many in the other direction. ``balancer`` is the run's, a name of ``fusco.BALANCERS``; some
    variants use another one, or none. What a variant of the caller sends is not known: zeros.
    """
    if is_of_caller(variant):
        return np.zeros([workload.topology.world_size] * 2, np.int64)
    if variant == "baseline":
        node = np.array(workload.topology.rank_to_node)
        return np.where(node[:, None] != node, rows_of_routing(workload), 0)
    if has_fixed_messages(variant, device):
        return _forwarded([[workload.tokens] * workload.topology.num_nodes] * workload.topology.world_size, workload)
    counts = []
    for rank in range(workload.topology.world_size):
        routing = workload.routing(rank)
        if variant == "no-planner":  # a copy for each rank of a node
            routing = expand(routing, workload.placement).routing
        counts.append(select_tokens(routing.topk_idx, workload.placement, workload.topology).num_tokens_to_node)
    return _forwarded(counts, workload, balancer_of(variant, balancer, device))


def busiest_rows(rank_to_rank: IntArray) -> int:
    """Return the maximum number of rows that any rank sends or any rank receives.

    A rank's links carry both directions at once, so the larger of the two bounds its time, and the busiest rank's
    bounds the time of all. A combine sends what a dispatch receives: its figure is the same.

    >>> busiest_rows(np.array([[0, 3], [5, 0]])), busiest_rows(np.array([[0, 0, 4], [0, 0, 4], [1, 0, 0]]))
    (5, 8)
    """
    return int(max(rank_to_rank.sum(axis=0).max(), rank_to_rank.sum(axis=1).max()))


def _forwarded(counts: Sequence[Sequence[int]], workload: Workload, balancer: str = "static") -> IntArray:
    """Return the rows to each forwarder, from each carrier, if rank ``r`` has ``counts[r][n]`` rows for node ``n``."""
    traffic = Traffic.from_counts(workload.topology, counts)
    return traffic.lanes_of(BALANCERS[balancer](traffic)).rank_to_rank


def num_copies(workload: Workload) -> int:
    """Return the maximum number of tokens of any rank, if each (token, rank that needs it) counts as a token."""
    ranks = range(workload.topology.world_size)
    return max(len(expand(workload.routing(rank), workload.placement).copy_to_token) for rank in ranks)

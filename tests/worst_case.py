"""FAST's bounds: the optimal time, and the worst case of a schedule. Source: FAST appendix A.1."""

from __future__ import annotations

import numpy as np

from fusco.core.lanes import IntArray
from fusco.core.topology import Topology
from fusco.schedule.cost import Links
from fusco.schedule.stages import lower_bound_bytes


def optimal_us(node_bytes: IntArray, ranks_per_node: int, links: Links) -> float:
    """Return the optimum of theorem 1: the busiest node's bytes over all its links, without latency.

    >>> optimal_us(np.array([[0, 3000], [9000, 0]]), ranks_per_node=3, links=Links(internode_gbs=1))
    3.0
    """
    return links.internode_us(lower_bound_bytes(node_bytes) / ranks_per_node)


def worst_case_us(node_bytes: IntArray, ranks_per_node: int, links: Links) -> float:
    """Return the bound of theorem 2: balancing, local messages, stages and the last redistribution, each at its worst.

    It holds if the local messages of a node are at most ``1 / num_nodes`` of what it sends to others.
    """
    sent = np.array(node_bytes, dtype=object)
    np.fill_diagonal(sent, 0)
    most_sent = int(sent.sum(axis=1).max(initial=0))
    balancing = links.intranode_us(most_sent * (ranks_per_node - 1) / ranks_per_node)
    local = links.intranode_us(most_sent / len(node_bytes))
    redistribution = links.intranode_us(int(sent.max(initial=0)) / ranks_per_node)
    return optimal_us(node_bytes, ranks_per_node, links) + balancing + local + redistribution


def worst_case_ratio(topology: Topology, links: Links) -> float:
    """Return the ratio of theorem 3, worst case to optimum: ``1 + (B2 / B1) * (m + m / n)``.

    The proof counts the last redistribution as what one rank sends, but one rank may have to receive that from all
    ``m - 1`` others. This matters for few nodes of many ranks: by ``schedule_us``, ``adversarial_bytes`` for 2 nodes of
    8 takes 2.56 times the optimum, not 2.33. From 3 nodes of 8 the bound holds, since local messages are hidden.

    The paper's example, 4 nodes of 8 GPUs with 450 GB/s within and 50 GB/s between nodes, "within 2.12":

    >>> round(worst_case_ratio(Topology.of_equal_nodes(32, 8), Links(internode_gbs=50, intranode_gbs=450)), 3)
    2.111
    """
    ratio = links.internode_gbs / links.intranode_gbs
    return 1 + ratio * (topology.ranks_per_node + topology.ranks_per_node / topology.num_nodes)


def adversarial_bytes(topology: Topology, pair_bytes: int) -> IntArray:
    """Return the adversarial workload of theorem 3, int64 (world_size, world_size).

    Each node has ``pair_bytes`` for each other, all at its first rank and all for the other's last rank. That maximises
    balancing and redistribution. Its local bytes are as many as theorem 2 allows, between two ranks.
    """
    rank_bytes = np.zeros((topology.world_size, topology.world_size), np.int64)
    for node, ranks in enumerate(topology.node_to_ranks):
        for other, other_ranks in enumerate(topology.node_to_ranks):
            if other != node:
                rank_bytes[ranks[0], other_ranks[-1]] = pair_bytes
        rank_bytes[ranks[0], ranks[-1]] += pair_bytes * (topology.num_nodes - 1) // topology.num_nodes
    return rank_bytes

"""Rows that cross between nodes, as all ranks know them after an exchange of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.core.lanes import Groups, IntArray, Lanes
from fusco.core.topology import RankLinks, Topology


@dataclass(frozen=True)
class Traffic:
    """Rows between nodes.

    Attributes:
        topology: nodes of the ranks.
        num_rows: ``num_rows[n, l, m]`` rows (int64) go from local rank ``l`` of node ``n`` to node ``m``; 0 where
            ``n == m``.
        rank_links: links of each rank to other nodes, or their capacities, int64 (num_nodes, ranks_per_node), at least
            one a node; ``None`` means one each.
    """

    topology: Topology
    num_rows: IntArray
    rank_links: IntArray | None = None

    @classmethod
    def from_counts(
        cls, topology: Topology, rank_to_counts: Sequence[Sequence[int]], rank_links: RankLinks | None = None
    ) -> Traffic:
        """Take the rows of rank ``r`` for node ``m`` from ``rank_to_counts[r][m]``; rows for its node are ignored."""
        num_rows = np.array(rank_to_counts, dtype=np.int64)[np.array(topology.node_to_ranks)]
        nodes = np.arange(topology.num_nodes)
        num_rows[nodes, :, nodes] = 0
        return cls(topology, num_rows, None if rank_links is None else np.array(rank_links, np.int64))

    @property
    def num_links(self) -> IntArray:
        """Links of each rank, int64 (num_nodes, ranks_per_node)."""
        return np.ones(self.num_rows.shape[:2], np.int64) if self.rank_links is None else self.rank_links

    @property
    def bound(self) -> float:
        """Rows of a link in the busiest node, sent or received, if the node's links shared them equally."""
        sent, received = self.num_rows.sum(axis=(1, 2)), self.num_rows.sum(axis=(0, 1))
        return float((np.maximum(sent, received) / self.num_links.sum(axis=1)).max())

    @property
    def rows_by_rank(self) -> IntArray:
        """Rows from each rank to each node, int64 (world_size, num_nodes)."""
        by_rank = np.empty((self.topology.world_size, self.topology.num_nodes), np.int64)
        by_rank[np.array(self.topology.node_to_ranks)] = self.num_rows
        return by_rank

    def lanes_of(self, chosen: Groups | Lanes) -> Lanes:
        """Return what a balancer chose as lanes."""
        return chosen if isinstance(chosen, Lanes) else Lanes.of_groups(chosen, self.rows_by_rank)

    def loads_of(self, chosen: Groups | Lanes) -> tuple[IntArray, IntArray]:
        """Return the rows that each rank sends to other nodes, and those that it receives, int64 (world_size,) each."""
        if isinstance(chosen, Lanes):
            return chosen.sent_rows, chosen.received_rows
        sent, received = np.empty((2, self.topology.world_size), np.int64)
        node_to_ranks = np.array(self.topology.node_to_ranks)
        sent[node_to_ranks] = self.rank_loads
        received[node_to_ranks[np.arange(len(node_to_ranks)), chosen.group_to_locals]] = self.received_rows(chosen)
        return sent, received

    @property
    def rank_loads(self) -> IntArray:
        """Rows that each rank sends to other nodes, int64 (num_nodes, ranks_per_node)."""
        return self.num_rows.sum(axis=2)

    def group_loads(self, groups: Groups) -> IntArray:
        """Return the rows that the members of each group send in total, int64 (ranks_per_node,)."""
        members = np.array(groups.group_to_locals)
        return self.rank_loads[np.arange(self.topology.num_nodes), members].sum(axis=1)

    def received_rows(self, groups: Groups) -> IntArray:
        """Return the rows that each rank receives as a forwarder, int64 (ranks_per_node groups, num_nodes)."""
        return received_by_group(self.num_rows, np.array(groups.group_to_locals))


@compiled()
def received_by_group(num_rows: Any, group_to_locals: Any) -> Any:
    """Return what ``Traffic.received_rows`` does."""
    num_groups, num_nodes = group_to_locals.shape
    received = np.zeros((num_groups, num_nodes), np.int64)
    for group in range(num_groups):
        for src in range(num_nodes):
            for dst in range(num_nodes):
                received[group, dst] += num_rows[src, group_to_locals[group, src], dst]
    return received

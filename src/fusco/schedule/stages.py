"""Stages between nodes: a sequence of one-to-one matchings with sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fusco.core.lanes import IntArray
from fusco.schedule.matrix import as_node_bytes


@dataclass(frozen=True, eq=False)
class Stages:
    """Decomposition of a node-to-node matrix into one-to-one matchings, int64 throughout.

    Attributes:
        dst_node: (num_stages, num_nodes), the destination of each node in each stage, -1 for none.
        num_bytes: (num_stages, num_nodes), the bytes that it sends; 0 where ``dst_node`` is -1.
        duration_bytes: (num_stages,), the length of each stage; no node sends more in it.
    """

    dst_node: IntArray
    num_bytes: IntArray
    duration_bytes: IntArray

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.duration_bytes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.dst_node.shape[1]

    @property
    def total_bytes(self) -> int:
        """Sum of all lengths: the time of the schedule, in bytes at one node's bandwidth."""
        return sum(self.duration_bytes.tolist())

    def shortest_first(self) -> Stages:
        """Return the stages in ascending order of length; the sort is stable.

        The redistribution of a stage is then hidden behind the next stage, which is no shorter (FAST, proof of theorem
        2).
        """
        order = np.argsort(self.duration_bytes, kind="stable")
        return Stages(self.dst_node[order], self.num_bytes[order], self.duration_bytes[order])

    def node_bytes(self) -> IntArray:
        """Return the bytes that the stages send from node to node, int64 (num_nodes, num_nodes)."""
        sent = np.zeros((self.num_nodes, self.num_nodes), np.int64)
        stage, src = np.nonzero(self.dst_node >= 0)
        np.add.at(sent, (src, self.dst_node[stage, src]), self.num_bytes[stage, src])
        return sent


def lower_bound_bytes(node_bytes: Any) -> int:
    """Return the largest row or column sum without the diagonal. No schedule is shorter, since a node has one link.

    Takes the same matrices as ``decompose``, with the same errors.

    >>> lower_bound_bytes(np.array([[0, 3, 4], [9, 0, 0], [1, 1, 0]]))
    10
    """
    off_diagonal = as_node_bytes(node_bytes)
    np.fill_diagonal(off_diagonal, 0)
    return int(max(off_diagonal.sum(axis=0).max(initial=0), off_diagonal.sum(axis=1).max(initial=0)))

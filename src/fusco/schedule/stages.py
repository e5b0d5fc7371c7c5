"""Stages between nodes, one-to-one matchings with sizes, of a matrix that is checked; transfers between ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.core.lanes import IntArray

_MAX_INT64 = np.iinfo(np.int64).max
_ROUNDED = 2.0**62  # float64 sums below this prove that int64 sums do not overflow


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


def as_matrix(values: Any, name: str, end: str = "node") -> npt.NDArray[np.int64]:
    """Return a square int64 matrix in C order for compiled code, a copy of ``values``.

    Raises ``TypeError`` unless entries are integers, ``ValueError`` unless the matrix is square and fits into int64, or
    with a negative entry and its two ends (nodes or ranks).
    """
    array = np.asarray(values)
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise ValueError(f"{name} must be a square matrix, got shape {array.shape}")
    is_large = array.dtype == object and all(isinstance(value, int) for value in array.flat)  # beyond any NumPy type
    if array.size and not (is_large or np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    if array.size and (is_large or array.dtype.kind == "u") and int(array.max()) > _MAX_INT64:
        raise ValueError(f"{name} must fit into int64, got {array.max()}")
    matrix = np.array(array, dtype=np.int64, order="C")
    if matrix.min(initial=0) < 0:
        src, dst = np.argwhere(matrix < 0)[0]
        raise ValueError(f"{name} must not be negative, got {matrix[src, dst]} from {end} {src} to {end} {dst}")
    return matrix


def as_node_bytes(values: Any) -> npt.NDArray[np.int64]:
    """Return a node-to-node matrix whose row and column sums fit into int64.

    The diagonal does not count in the sums. Raises as ``as_matrix``, and ``ValueError`` with the node and its sum.
    """
    node_bytes = as_matrix(values, "node_bytes")
    for what, sends in (("sends", node_bytes), ("receives", node_bytes.T)):
        if sends.sum(axis=1, dtype=np.float64).max(initial=0) < _ROUNDED:
            continue
        for node, row in enumerate(sends.tolist()):
            total = sum(row) - row[node]
            if total > _MAX_INT64:
                raise ValueError(f"node {node} {what} {total} bytes, more than int64 holds")
    return node_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """Pieces of messages, int64 (num_transfers,) each, in the order in which both ends lay them out.

    A message is what ``src_rank`` has for ``dst_rank``. Its bytes ``first_byte`` to ``first_byte + num_bytes`` go from
    ``from_rank`` to ``to_rank`` in stage ``stage`` (-1 for none). Pieces with the same two ends and the same stage form
    one flow, in order.
    """

    from_rank: IntArray
    to_rank: IntArray
    src_rank: IntArray
    dst_rank: IntArray
    first_byte: IntArray
    num_bytes: IntArray
    stage: IntArray

    def __len__(self) -> int:
        return len(self.num_bytes)

    def select(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Transfers:
        """Select transfers by a mask or by indices, in their order."""
        return Transfers(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def sent_by(self, rank: int) -> Transfers:
        """Select the transfers that a rank sends."""
        return self.select(self.from_rank == rank)

    def received_by(self, rank: int) -> Transfers:
        """Select the transfers that a rank receives."""
        return self.select(self.to_rank == rank)

    def load(self, num_ranks: int) -> IntArray:
        """Return the bytes that each rank sends to and receives from other ranks: int64 (2, num_ranks)."""
        loads = np.zeros((2, num_ranks), np.int64)
        moves = self.from_rank != self.to_rank
        np.add.at(loads[0], self.from_rank[moves], self.num_bytes[moves])
        np.add.at(loads[1], self.to_rank[moves], self.num_bytes[moves])
        return loads

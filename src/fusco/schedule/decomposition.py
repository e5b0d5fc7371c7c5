"""Decomposition of a node-to-node matrix into stages: in two modes, or by SpreadOut, MPI's baseline."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fusco.schedule.exact import decompose_exactly
from fusco.schedule.few import decompose_in_few
from fusco.schedule.stages import Stages, as_matrix, as_node_bytes

Mode = Literal["exact", "few"]

_ARRAY, _INT64 = np.ndarray, np.dtype(np.int64)
_MODE_TO_KERNEL = {"exact": decompose_exactly, "few": decompose_in_few}


def decompose(node_bytes: Any, *, mode: Mode = "exact") -> Stages:
    """Split a node-to-node matrix into stages in which every node has one partner.

    ``"exact"`` takes as long as the busiest node needs (``lower_bound_bytes``) in at most ``N**2 - 2 * N + 2`` stages.
    ``"few"`` takes at most 2 % longer in far fewer stages: at most ``3 * N`` for every matrix tried, usually
    ``2 * N``. If it ever needs more, it returns the exact stages instead. Both time limits hold for any matrix. The
    result is the same on every rank. The first call compiles; see ``warm_up``.

    Args:
        node_bytes: integers (num_nodes, num_nodes), the bytes that node ``i`` (row) sends to node ``j``. int64 in C
            order is used as it is, everything else is copied. The diagonal is ignored, but must not be negative.
        mode: ``"exact"`` or ``"few"``.

    Raises:
        TypeError: the entries aren't integers.
        ValueError: the matrix isn't square, an entry is negative, a row or column sum exceeds int64, or the mode is
            unknown. The message has the values.

    Source: FAST section 4.2 (exact); mode ``"few"`` is fusco's.

    >>> stages = decompose(np.array([[0, 3, 4], [9, 0, 0], [1, 1, 0]]))
    >>> stages.duration_bytes.sum(), stages.num_stages
    (np.int64(10), 3)
    >>> stages.dst_node.tolist()
    [[1, 0, -1], [2, 0, 1], [2, -1, 0]]
    """
    kernel = _MODE_TO_KERNEL.get(mode)
    if kernel is None:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _MODE_TO_KERNEL))}, got {mode!r}")
    # Inlined, since each call counts where the whole takes three microseconds.
    if not (
        type(node_bytes) is _ARRAY and node_bytes.dtype is _INT64 and node_bytes.ndim == 2 and node_bytes.flags.carray
    ):
        node_bytes = as_matrix(node_bytes, "node_bytes")
    try:
        return Stages(*kernel(node_bytes))
    except ValueError:
        as_node_bytes(node_bytes)  # raises the error that says what is wrong
        raise


def spread_out(node_bytes: Any) -> Stages:
    """Make stages of shifted diagonals: in stage ``i``, node ``s`` sends everything for ``(s + i) % num_nodes``.

    Empty stages are left out. Each stage is as long as the largest entry of its diagonal, so the busiest node may wait.
    Takes the same matrices as ``decompose``, with the same errors. Source: FAST section 4.2, after Netterville et al.
    (2022).

    >>> spread_out(np.array([[0, 3, 4], [9, 0, 0], [1, 1, 0]])).duration_bytes
    array([3, 9])
    """
    node_bytes = as_node_bytes(node_bytes)
    num_nodes = len(node_bytes)
    nodes = np.arange(num_nodes)
    dst_node = (nodes + np.arange(1, num_nodes)[:, None]) % num_nodes
    num_bytes = node_bytes[nodes, dst_node]
    duration_bytes = num_bytes.max(axis=1, initial=0)
    is_used = duration_bytes > 0
    dst_node = np.where(num_bytes > 0, dst_node, -1)
    return Stages(dst_node[is_used], num_bytes[is_used], duration_bytes[is_used])

"""SpreadOut, MPI's schedule of shifted diagonals: the baseline between nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.schedule.matrix import as_node_bytes
from fusco.schedule.stages import Stages


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

"""Validation of matrices of bytes between nodes or ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_INT64 = np.iinfo(np.int64).max
_ROUNDED = 2.0**62  # float64 sums below this prove that int64 sums do not overflow


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

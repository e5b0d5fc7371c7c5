"""Node-to-node matrices: made by name, or read from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fusco.bench.arrays import load_array, load_integers_of_csv
from fusco.bench.names import MatrixKind
from fusco.schedule.matrix import as_matrix
from fusco.schedule.stages import IntArray


def make_matrix(
    kind: MatrixKind, num_nodes: int, *, largest: int = 100_000, skew: float = 0.8, seed: int = 0
) -> IntArray:
    """An int64 matrix (num_nodes, num_nodes) of entries from 1 to ``largest``, zero on the diagonal.

    >>> make_matrix(MatrixKind.UNIFORM, 2, largest=7)
    array([[0, 7],
           [7, 0]])
    """
    random = np.random.default_rng(seed)
    shape = (num_nodes, num_nodes)
    matrix: IntArray
    if kind is MatrixKind.UNIFORM:
        matrix = np.full(shape, largest, np.int64)
    elif kind is MatrixKind.RANDOM:
        matrix = random.integers(1, largest + 1, shape)
    else:
        places = np.arange(1, num_nodes * num_nodes + 1, dtype=np.float64)
        sizes = np.maximum(1, largest * places**-skew).astype(np.int64)
        matrix = random.permutation(sizes).reshape(shape)
    np.fill_diagonal(matrix, 0)
    return matrix


def load_matrix(path: Path) -> IntArray:
    """A square matrix of integers from a ``.npy`` file or a ``.csv`` file without header; ``ValueError`` otherwise."""
    if path.suffix not in (".npy", ".csv"):
        raise ValueError(f"a matrix comes from a .npy or .csv file, got {path}")
    values = load_integers_of_csv(path) if path.suffix == ".csv" else load_array(path)
    try:
        return as_matrix(values, "the matrix")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error

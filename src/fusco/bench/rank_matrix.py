"""Rank-to-rank matrices of bytes for benchmarks of all-to-all."""

from __future__ import annotations

import numpy as np

from fusco.bench.matrices import make_matrix
from fusco.bench.names import ExchangeMatrix, MatrixKind
from fusco.bench.traffic import Workload
from fusco.schedule.stages import IntArray

_LARGEST = 1 << 30  # before scaling: fine enough that rounding does not show


def make_rank_bytes(
    matrix: ExchangeMatrix,
    num_ranks: int,
    bytes_per_rank: int,
    *,
    skew: float = 0.0,
    seed: int = 0,
    workload: Workload | None = None,
) -> IntArray:
    """Return the bytes that each rank sends to each other, int64 (num_ranks, num_ranks).

    Args:
        matrix: the kind; entries of all but ``TRACE`` are those of ``make_matrix``, zero on the diagonal.
        num_ranks: how many ranks there are.
        bytes_per_rank: bytes that a rank sends to others, on average.
        skew: of ``ZIPF``.
        seed: of all but ``TRACE``.
        workload: the routing of ``TRACE``.
    """
    if matrix is ExchangeMatrix.TRACE:
        assert workload is not None
        shape = rows_of_routing(workload)
    else:
        shape = make_matrix(MatrixKind(matrix.value), num_ranks, largest=_LARGEST, skew=skew, seed=seed)
    to_others = int(shape.sum() - np.trace(shape))
    if not to_others:
        return np.zeros_like(shape)
    return (shape * (bytes_per_rank * num_ranks / to_others)).astype(np.int64)


def rows_of_routing(workload: Workload) -> IntArray:
    """Return the rows that each rank sends to each if a token is sent once per expert, (world_size, world_size)."""
    expert_to_rank = np.array(workload.placement.expert_to_rank)
    world_size = workload.topology.world_size
    ids = (workload.routing(rank).topk_idx.numpy() for rank in range(world_size))
    return np.stack([np.bincount(expert_to_rank[i[i >= 0]], minlength=world_size) for i in ids]).astype(np.int64)

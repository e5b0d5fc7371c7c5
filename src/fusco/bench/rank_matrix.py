"""What ranks have for each other in a benchmark of all-to-all."""

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
    """Bytes that each rank has for each other, int64 (num_ranks, num_ranks).

    Args:
        matrix: see there; the entries of all but ``TRACE`` are as ``make_matrix`` has them, with nothing for the rank
            itself.
        num_ranks: how many ranks there are.
        bytes_per_rank: what a rank sends to others, on average.
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
    """What each rank sends each other if a token goes once for each of its experts, (world_size, world_size)."""
    expert_to_rank = np.array(workload.placement.expert_to_rank)
    world_size = workload.topology.world_size
    ids = (workload.routing(rank).topk_idx.numpy() for rank in range(world_size))
    return np.stack([np.bincount(expert_to_rank[i[i >= 0]], minlength=world_size) for i in ids]).astype(np.int64)

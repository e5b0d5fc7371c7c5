"""What ranks have for each other in a benchmark of all-to-all, in rows."""

from __future__ import annotations

import numpy as np

from fusco.bench.traffic import Workload
from fusco.schedule.stages import IntArray


def rows_of_routing(workload: Workload) -> IntArray:
    """Rows that each rank sends each other if a token is sent once for each of its experts: (world_size, world_size)."""
    expert_to_rank = np.array(workload.placement.expert_to_rank)
    world_size = workload.topology.world_size
    ids = (workload.routing(rank).topk_idx.numpy() for rank in range(world_size))
    return np.stack([np.bincount(expert_to_rank[i[i >= 0]], minlength=world_size) for i in ids]).astype(np.int64)

"""Input of all ranks, which each rank rebuilds to verify what it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusco.bench.traffic import Workload


@dataclass(frozen=True)
class WorldInput:
    """The rows and the routing of all ranks."""

    rows: Sequence[torch.Tensor]
    topk_idx: Sequence[torch.Tensor]
    topk_weights: Sequence[torch.Tensor]

    @classmethod
    def of(cls, workload: Workload, device: torch.device | str = "cpu") -> WorldInput:
        """Rebuild the input of every rank."""
        ranks = range(workload.topology.world_size)
        routings = [workload.routing(rank) for rank in ranks]
        return cls(
            [workload.rows(rank, device) for rank in ranks],
            [routing.topk_idx.to(device) for routing in routings],
            [routing.topk_weights.to(device) for routing in routings if routing.topk_weights is not None],
        )


def world_bytes(workload: Workload) -> int:
    """Return the memory that the rows of a ``WorldInput`` take while they are made, the last rank's in float32."""
    num_elements = workload.tokens * workload.hidden
    return num_elements * (workload.topology.world_size * workload.dtype.itemsize + torch.float32.itemsize)

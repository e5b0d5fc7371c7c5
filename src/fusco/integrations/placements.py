"""Placements of experts that a framework chose: numbers of experts and numbers of places, and the way between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.control.store_gather import StoreGather
from fusco.core.config import Settings


@dataclass(frozen=True)
class PlacementTable:
    """The place of each expert: places of rank 0 come first, and a rank's are in order of its local experts.

    fusco moves rows to places, so that any placement with equal numbers is one with runs of consecutive places.
    """

    expert_to_place: torch.Tensor | None  # int64 (num_experts + 1,), the last is -1 for no expert; ``None`` if the same
    experts_here: torch.Tensor  # int64 (num_local_experts + 1,), this rank's; the last is another rank's, or -1

    @classmethod
    def agree(
        cls, group: dist.ProcessGroup, num_experts: int, expert_map: torch.Tensor | None, device: torch.device
    ) -> PlacementTable:
        """Return the table, on a device, of what each rank says of itself; a collective, and the host waits.

        ``expert_map`` is (num_experts,), the local index of each expert of this rank and -1 for others; ``None`` for
        runs of consecutive experts. Raises ``ValueError`` unless each expert is on one rank, and ranks have equal
        numbers; all ranks raise.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        num_local = num_experts // size
        here = list(range(rank * num_local, (rank + 1) * num_local))
        if expert_map is not None:
            given = expert_map.tolist()
            here = sorted((expert for expert, local in enumerate(given) if local >= 0), key=given.__getitem__)
        gather = StoreGather(group, Settings().timeout_s)
        ranks = gather.all_gather("the placement of experts", here)
        table = [expert for experts in ranks for expert in experts]
        if any(len(experts) != num_local for experts in ranks) or sorted(table) != list(range(num_experts)):
            raise ValueError(
                f"fusco needs each of {num_experts} experts on one rank, and {num_local} on every rank; ranks have "
                f"{'; '.join(f'{rank}: {experts}' for rank, experts in enumerate(ranks))}"
            )
        other = next((expert for experts in (*ranks[:rank], *ranks[rank + 1 :]) for expert in experts), -1)
        experts_here = torch.tensor([*here, other], dtype=torch.int64, device=device)
        if table == list(range(num_experts)):
            return cls(None, experts_here)
        places = torch.empty(num_experts + 1, dtype=torch.int64, device="cpu")
        places[torch.tensor([*table, num_experts], device="cpu")] = torch.tensor(
            [*range(num_experts), -1], device="cpu"
        )
        return cls(places.to(device), experts_here)

    def to_places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of experts, in the shape of their ids, -1 for no expert; nothing waits on CUDA."""
        return ids if self.expert_to_place is None else self.expert_to_place[ids]

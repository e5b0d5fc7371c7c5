"""The kernel ``choose_owners``: the physical expert of each pair, where an expert is in several places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fusco.cuda.kernels.abi import I32, I64, POINTER, address, struct
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import CHOOSE_OWNERS_PAIRS, CHOOSE_OWNERS_THREADS
from fusco.planner.owners import OwnerTables

# ``ChooseArgs`` of choose_owners.cu.
ChooseArgs = struct(
    "ChooseArgs",
    (POINTER, "topk_idx chosen expert_to_first owners expert_to_divided bounds"),
    (I64, "num_pairs"),
    (I32, "num_experts num_physical rank max_divided"),
)


@dataclass(frozen=True)
class DeviceOwnerTables:
    """``OwnerTables`` in device memory that is written again for another placement, all int32, C at most P * R.

    Attributes:
        expert_to_first: (E + 1,).
        owners, units, owner_to_rank: (C,).
        expert_to_divided: (E,).
        divided: (``max_divided``,), -1 behind the experts that have several owners.
        rank_to_node: (R,).
        counts: (R, E), the rows of each rank for each expert.
        quotas, bounds: (C,), what ``divide_rows`` makes of the counts.
        rank: this rank.
        max_divided: the most experts that may have several owners.
    """

    expert_to_first: torch.Tensor
    owners: torch.Tensor
    units: torch.Tensor
    owner_to_rank: torch.Tensor
    expert_to_divided: torch.Tensor
    divided: torch.Tensor
    rank_to_node: torch.Tensor
    counts: torch.Tensor
    quotas: torch.Tensor
    bounds: torch.Tensor
    rank: int
    max_divided: int

    @classmethod
    def empty(
        cls, num_experts: int, num_physical: int, rank: int, rank_to_node: Sequence[int], device: torch.device
    ) -> DeviceOwnerTables:
        """Return tables for any placement of so many experts in so many places."""

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        most = max_divided(num_experts, num_physical)
        return cls(
            expert_to_first=table(num_experts + 1),
            owners=table(num_physical),
            units=table(num_physical),
            owner_to_rank=table(num_physical),
            expert_to_divided=table(num_experts),
            divided=table(most),
            rank_to_node=torch.tensor(rank_to_node, dtype=torch.int32, device=device),
            counts=table(len(rank_to_node), num_experts),
            quotas=table(num_physical),
            bounds=table(num_physical),
            rank=rank,
            max_divided=most,
        )

    def of_placement(self, tables: OwnerTables) -> list[tuple[torch.Tensor, npt.NDArray[np.int32]]]:
        """Return the tables that a placement changes, up to the size of those on the host, each with its values."""
        divided = np.full(self.max_divided, -1)
        divided[: len(tables.divided)] = tables.divided
        pairs = (
            (self.expert_to_first, tables.expert_to_first),
            (self.owners, tables.owners),
            (self.units, tables.units),
            (self.owner_to_rank, tables.owner_to_rank),
            (self.expert_to_divided, tables.expert_to_divided),
            (self.divided, divided),
        )
        return [(to[: len(values)], np.ascontiguousarray(values, np.int32)) for to, values in pairs]


def max_divided(num_experts: int, num_physical: int) -> int:
    """Return how many experts may have several owners, as others may be lost."""
    return min(num_experts, num_physical // 2)


def choose_owners(
    launcher: Launcher, tables: DeviceOwnerTables, topk_idx: torch.Tensor, bounds: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the physical expert of each pair, contiguous, of the dtype and shape of ``topk_idx``; see the twin.

    ``bounds`` are those of ``OwnerTables.divide_rows``, int32 (C,) on the device; without them owners take turns.
    Reads the tables when the kernel runs, also in replays of a graph.
    """
    ids = topk_idx.contiguous()
    chosen = torch.empty_like(ids)
    if not ids.numel():
        return chosen
    arguments = ChooseArgs(
        topk_idx=ids.data_ptr(),
        chosen=chosen.data_ptr(),
        expert_to_first=tables.expert_to_first.data_ptr(),
        owners=tables.owners.data_ptr(),
        expert_to_divided=tables.expert_to_divided.data_ptr(),
        bounds=address(bounds),
        num_pairs=ids.numel(),
        num_experts=len(tables.expert_to_divided),
        num_physical=len(tables.owners),
        rank=tables.rank,
        max_divided=tables.max_divided,
    )
    grid = -(-ids.numel() // CHOOSE_OWNERS_PAIRS)
    key = ("choose_owners", ids.element_size(), grid, tables.max_divided)
    prepared = launcher.prepared.use(key)
    if prepared is None:
        prepared = launcher.prepare(
            key,
            {"ID_BYTES": ids.element_size(), "PAIRS_PER_BLOCK": CHOOSE_OWNERS_PAIRS},
            ChooseArgs(),
            grid=grid,
            num_threads=CHOOSE_OWNERS_THREADS,
            shared_bytes=4 * tables.max_divided,
        )
    for name, _ in ChooseArgs._fields_:  # type: ignore[misc]
        setattr(prepared.arguments, name, getattr(arguments, name))
    prepared.launch(launcher.stream)
    return chosen

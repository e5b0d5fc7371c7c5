"""The kernel ``choose_owners``: the physical expert of each pair, where an expert is in several places."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.cuda.kernels.abi import I32, I64, POINTER, address, struct
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import CHOOSE_OWNERS_PAIRS, CHOOSE_OWNERS_THREADS

# ``ChooseArgs`` of choose_owners.cu.
ChooseArgs = struct(
    "ChooseArgs",
    (POINTER, "topk_idx chosen expert_to_first owners expert_to_divided bounds"),
    (I64, "num_pairs"),
    (I32, "num_experts num_physical rank max_divided"),
)


@dataclass(frozen=True)
class DeviceOwnerTables:
    """``OwnerTables`` in device memory that is written again for another placement, all int32.

    ``owners`` has room for all physical experts. At most ``max_divided`` experts have several owners.
    """

    expert_to_first: torch.Tensor
    owners: torch.Tensor
    expert_to_divided: torch.Tensor
    rank: int
    max_divided: int

    @classmethod
    def empty(cls, num_experts: int, num_physical: int, rank: int, device: torch.device) -> DeviceOwnerTables:
        """Return tables for any placement of so many experts in so many places."""
        first, owners, divided = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (num_experts + 1, num_physical, num_experts)
        )
        return cls(first, owners, divided, rank, max_divided(num_experts, num_physical))


def max_divided(num_experts: int, num_physical: int) -> int:
    """Return how many experts may have several owners."""
    return max(0, min(num_experts, num_physical - num_experts))


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

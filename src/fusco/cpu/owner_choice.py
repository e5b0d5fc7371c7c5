"""Choice of the owner of each row on the CPU."""

from __future__ import annotations

import torch

from fusco.core.lanes import IntArray
from fusco.cpu.kernels.choose_owners import choose_owners, count_divided
from fusco.planner.owners import Int32Array, OwnerTables


class CpuOwnerChoice:
    """Methods are those of ``fusco.engine.owner_choice.OwnerChoice``, documented there."""

    _tables: OwnerTables

    def place(self, tables: OwnerTables) -> None:
        self._tables = tables

    def count(self, topk_idx: torch.Tensor) -> IntArray:
        return count_divided(topk_idx, self._tables)

    def count_experts(self, topk_idx: torch.Tensor) -> IntArray:
        num_experts, flat = self._tables.num_experts, topk_idx.reshape(-1)
        counts: IntArray = torch.bincount(flat[flat >= 0], minlength=num_experts)[:num_experts].numpy()
        return counts

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | None) -> torch.Tensor:
        return choose_owners(topk_idx, self._tables, bounds)

"""Choice of the owner of each row on the CPU."""

from __future__ import annotations

import torch

from fusco.core.lanes import IntArray
from fusco.cpu.kernels.choose_owners import choose_owners, count_experts
from fusco.planner.owners import Int32Array, OwnerTables


class CpuOwnerChoice:
    """Methods are those of ``fusco.engine.owner_choice.OwnerChoice``, documented there."""

    _tables: OwnerTables

    def place(self, tables: OwnerTables) -> None:
        self._tables = tables

    def count_experts(self, topk_idx: torch.Tensor) -> IntArray:
        return count_experts(topk_idx, self._tables.num_experts)

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | torch.Tensor | None) -> torch.Tensor:
        assert not isinstance(bounds, torch.Tensor)  # which only a device makes
        return choose_owners(topk_idx, self._tables, bounds)

"""Interface of a backend's choice of owners, where an expert is in several places; see ``fusco.planner.owners``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from fusco.core.balance import Balance, BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.planner.owners import Int32Array, OwnerTables


class OwnerChoice(Protocol):
    """Chooses the owner of each row of this rank. Tensors are on the engine's device."""

    def place(self, tables: OwnerTables) -> None:
        """Take these tables for all further calls; on a device, also for replays of graphs, in order of the stream."""

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | torch.Tensor | None) -> torch.Tensor:
        """Return the physical expert of each pair, of the dtype and shape of ``topk_idx``, contiguous.

        ``bounds`` are those of ``OwnerTables.divide_rows``, or of ``divide``, if there are shares. Invalid ids stay
        invalid.
        """


@runtime_checkable
class HostChoice(OwnerChoice, Protocol):
    """A choice whose host exchanges counts."""

    def count_experts(self, topk_idx: torch.Tensor) -> IntArray:
        """Return the pairs (token, k) of every expert, int64 (E,), without invalid ids."""


@runtime_checkable
class DeviceChoice(OwnerChoice, Protocol):
    """A choice whose device exchanges counts. All ranks have agreed before they call what exchanges them."""

    def divide(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Exchange counts; return the bounds of ``OwnerTables.divide_rows``, int32 (C,). No host waits."""

    def plan(self, topk_idx: torch.Tensor, placement: ExpertPlacement, balance: Balance) -> BatchPlan:
        """Exchange counts, and plan a batch; the host waits for the plan. Each expert has one place."""

    def choose_planned(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """``choose`` by the latest plan."""

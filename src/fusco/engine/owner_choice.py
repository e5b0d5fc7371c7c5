"""Interface of a backend's choice of owners, where an expert is in several places; see ``fusco.planner.owners``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from fusco.core.balance import Balance, BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.planner.owners import Int32Array, OwnerTables


@dataclass(frozen=True, eq=False)
class DeviceBatchPlan:
    """The plan of a batch on the device that made it, for ``Communicator.prefetch_experts``.

    Attributes:
        table: int32: number of copies, 1 if the aim could be held, rows of each expert (E,), then expert, rank and rows
            of each copy; behind the last one, undefined. A replay of a graph writes it anew.
        placement, balance: what is planned.
        batches: the device's tables of both.
        fetch: returns the plan on the host, once the device has made it.
    """

    table: torch.Tensor
    placement: ExpertPlacement
    balance: Balance
    batches: Any
    fetch: Callable[[], BatchPlan]

    @property
    def rows_per_expert(self) -> torch.Tensor:
        """Rows of each expert of all ranks, int32 (E,), in the table."""
        return self.table[2 : 2 + self.placement.num_experts]

    def wait(self) -> BatchPlan:
        """Return the plan; the host waits for the device, within the communicator's limit.

        Raises ``PeerFailureError`` if a rank's counts have not come by then.
        """
        return self.fetch()


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

    def has_planned(self, placement: ExpertPlacement, balance: Balance) -> bool:
        """Return whether the latest plan was of these, so that another one may be captured."""

    def plan(self, topk_idx: torch.Tensor, placement: ExpertPlacement, balance: Balance) -> DeviceBatchPlan:
        """Exchange counts, and plan a batch, each expert of which has one place. No host waits."""

    @property
    def captured_balances(self) -> Sequence[Balance]:
        """Those of the plans that graphs have captured."""

    def replan(self, placement: ExpertPlacement) -> None:
        """Let replays of captured plans plan for a placement that all their balances allow, in order of the stream."""

    def copy_experts(
        self, plan: DeviceBatchPlan, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, is_sum: bool
    ) -> None:
        """Copy experts, tensors (P, ...), to spare places within the node; no host waits. See ``copy_experts.cu``.

        With ``is_sum`` add gradients of copies to sums at home, in ascending order of rank.
        """

    def choose_planned(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """``choose`` by the latest plan."""

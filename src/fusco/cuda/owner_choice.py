"""Choice of the owner of each row on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fusco.core.config import Launch
from fusco.core.lanes import IntArray
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import pinned
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables, choose_owners
from fusco.cuda.stream_order import StreamOrder
from fusco.planner.owners import Int32Array, OwnerTables


class CudaOwnerChoice:
    """Methods are those of ``fusco.engine.owner_choice.OwnerChoice``, documented there.

    Everything is launched on the caller's stream, in the order of the communicator's calls.
    """

    def __init__(self, context: CudaContext, order: StreamOrder) -> None:
        """Allocate tables for any placement."""
        self._context, self._order, self._device = context, order, context.arena.device
        sizes = (context.num_experts, context.placement.num_experts)
        self._tables = DeviceOwnerTables.empty(*sizes, context.rank, self._device)

    def place(self, tables: OwnerTables) -> None:
        with self._order.on_stream(Launch()):
            for to, table in (
                (self._tables.expert_to_first, tables.expert_to_first),
                (self._tables.owners, tables.owners),
                (self._tables.expert_to_divided, tables.expert_to_divided),
            ):
                to[: len(table)].copy_(self._pinned(table), non_blocking=True)
        self._num_divided = len(tables.divided)

    def count(self, topk_idx: torch.Tensor) -> IntArray:
        """Return counts; the host waits for the device."""
        return self._count(topk_idx, self._num_divided, lambda ids: self._tables.expert_to_divided[ids].long())

    def count_experts(self, topk_idx: torch.Tensor) -> IntArray:
        """Return counts; the host waits for the device."""
        return self._count(topk_idx, self._context.num_experts, lambda ids: ids)

    def _count(
        self, topk_idx: torch.Tensor, num_counts: int, index_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> IntArray:
        """Return the pairs of each index, int64 (num_counts,); ``index_of`` valid ids, -1 for those not to count."""
        num_experts = self._context.num_experts
        with self._order.on_stream(Launch(), topk_idx) as stream:
            ids = topk_idx.reshape(-1).long()
            indices = index_of(ids.clamp(0, num_experts - 1))
            is_counted = (ids >= 0) & (ids < num_experts) & (indices >= 0)
            indices = torch.where(is_counted, indices, num_counts)
            counts = torch.zeros(num_counts + 1, dtype=torch.int64, device=self._device)
            counts.index_add_(0, indices, torch.ones_like(indices))
            on_host = pinned(torch.empty(num_counts + 1, dtype=torch.int64, device="cpu"), self._device)
            on_host.copy_(counts, non_blocking=True)
            done = stream.record_event()
        self._context.watchdog.wait_until(done.query, lambda: own_backlog("the rows of each expert"))
        of_experts: IntArray = on_host[:num_counts].numpy()
        return of_experts

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | None) -> torch.Tensor:
        with self._order.on_stream(Launch(), topk_idx) as stream:
            on_device = None if bounds is None else self._pinned(bounds).to(self._device, non_blocking=True)
            return choose_owners(self._context.launcher(stream), self._tables, topk_idx, on_device)

    def _pinned(self, table: Int32Array) -> torch.Tensor:
        """Return a copy of a table in memory that stays allocated until the stream has read it."""
        return pinned(torch.from_numpy(np.ascontiguousarray(table)), self._device)

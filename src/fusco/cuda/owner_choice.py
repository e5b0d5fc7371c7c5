"""Choice of the owner of each row on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from fusco.core.balance import Balance, BatchPlan
from fusco.core.config import Launch
from fusco.core.placement import ExpertPlacement
from fusco.cuda.between_nodes.network import Network, messages_of
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import pinned
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables, choose_owners
from fusco.cuda.kernels.copy_experts import copy_experts
from fusco.cuda.kernels.divide_rows import divide_rows
from fusco.cuda.kernels.plan_batch import DeviceBatches, plan_batch
from fusco.cuda.kernels.share_counts import share_counts
from fusco.cuda.stream_order import StreamOrder
from fusco.engine.owner_choice import DeviceBatchPlan
from fusco.planner.owners import Int32Array, OwnerTables


class CudaOwnerChoice:
    """Methods are those of ``fusco.engine.owner_choice.OwnerChoice``, documented there.

    Everything is launched on the caller's stream, in the order of the communicator's calls, or on the network's for it.
    """

    def __init__(self, context: CudaContext, order: StreamOrder, network: Network | None = None) -> None:
        """Allocate tables for any placement; ``network`` is to other nodes."""
        self._context, self._order, self._network = context, order, network
        self._device = context.arena.device
        sizes = (context.num_experts, context.placement.num_experts, context.rank, context.topology.rank_to_node)
        self._tables = DeviceOwnerTables.empty(*sizes, self._device)
        self._planned = replace(DeviceOwnerTables.empty(*sizes, self._device), counts=self._tables.counts)
        self._batches: DeviceBatches | None = None  # of the latest plan
        self._captured: list[DeviceBatches] = []  # that graphs read

    def place(self, tables: OwnerTables) -> None:
        with self._order.on_stream(Launch()):
            for to, values in self._tables.of_placement(tables):
                # in memory that stays allocated until the stream has read it
                to.copy_(pinned(torch.from_numpy(values), self._device), non_blocking=True)

    def divide(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return bounds in memory that the next call overwrites; no host waits."""
        with self._order.on_stream(Launch(), topk_idx) as stream:
            self._share_counts(topk_idx, stream)
            divide_rows(self._context.launcher(stream), self._tables)
        return self._tables.bounds

    def has_planned(self, placement: ExpertPlacement, balance: Balance) -> bool:
        known = self._batches
        return known is not None and (known.placement, known.balance) == (placement, balance)

    @property
    def captured_balances(self) -> list[Balance]:
        return [each.balance for each in self._captured]

    def replan(self, placement: ExpertPlacement) -> None:
        with self._order.on_stream(Launch()):
            for each in self._captured:
                each.replan(placement)

    def plan(self, topk_idx: torch.Tensor, placement: ExpertPlacement, balance: Balance) -> DeviceBatchPlan:
        topology = self._context.topology
        with self._order.on_stream(Launch(), topk_idx) as stream:
            if self._batches is None or not self.has_planned(placement, balance):
                self._batches = DeviceBatches.of(placement, balance, self._device)
            batches = self._batches
            if self._context.gpu.is_capturing() and batches not in self._captured:
                self._captured.append(batches)
            self._share_counts(topk_idx, stream)
            launcher = self._context.launcher(stream)
            ranks_per_node = topology.ranks_per_node if topology.num_nodes > 1 else topology.world_size
            table = plan_batch(launcher, batches, self._planned, ranks_per_node)
            divide_rows(launcher, self._planned, has_quotas=True)
        return DeviceBatchPlan(table, placement, balance, batches, partial(self._fetch, table, batches))

    def _fetch(self, table: torch.Tensor, batches: DeviceBatches) -> BatchPlan:
        """Wait on the host for a plan."""
        with self._order.on_stream(Launch(), table) as stream:
            on_host = pinned(torch.empty(table.shape, dtype=torch.int32, device="cpu"), self._device)
            on_host.copy_(table, non_blocking=True)
            done = stream.record_event()
        self._context.watchdog.wait_until(done.query, lambda: own_backlog("the plan of a batch"))
        self._context.watchdog.check_device()  # a rank whose counts have not come
        return batches.plan_of(on_host)

    def copy_experts(
        self, plan: DeviceBatchPlan, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, is_sum: bool
    ) -> None:
        with self._order.on_stream(Launch(), plan.table, *sources, *targets) as stream:
            launcher, offset = self._context.launcher(stream), self._context.copies_offset
            copy_experts(launcher, plan.batches, plan.table, offset, sources, targets, is_sum=is_sum)

    def choose_planned(self, topk_idx: torch.Tensor) -> torch.Tensor:
        with self._order.on_stream(Launch(), topk_idx) as stream:
            return choose_owners(self._context.launcher(stream), self._planned, topk_idx, self._planned.bounds)

    def _share_counts(self, topk_idx: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Exchange the counts of all ranks, into tables of the placement and of batches."""
        context, counts = self._context, self._tables.counts
        share_counts(context.launcher(stream), topk_idx, counts, context.counts_offset, context.arena.node_ranks)
        if self._network:
            self._share_between_nodes(self._network, stream)

    def _share_between_nodes(self, network: Network, stream: torch.cuda.Stream) -> None:
        """Exchange this rank's counts with the ranks of other nodes."""
        counts, node_ranks = self._tables.counts, self._context.arena.node_ranks
        others = [rank for rank in range(len(counts)) if rank not in node_ranks]
        sends = messages_of((rank, counts[self._context.rank]) for rank in others)
        receives = messages_of((rank, counts[rank]) for rank in others)
        network.stream.wait_stream(stream)
        with self._context.gpu.on(network.stream):
            done = network.exchange(sends, receives, "the rows of each expert")
        stream.wait_event(done)

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | torch.Tensor | None) -> torch.Tensor:
        assert bounds is None or isinstance(bounds, torch.Tensor)  # as no host divides
        with self._order.on_stream(Launch(), topk_idx) as stream:
            return choose_owners(self._context.launcher(stream), self._tables, topk_idx, bounds)

"""Baseline: permute, ``all_to_all_single``, permute, and the same back. It also serves as reference result.

Written as well as these operations allow. Indices come from one sort and from counts. One exchange tells ranks the
counts of each expert, and one copy brings them to the host, the only wait of a dispatch. A combine waits for nothing,
and one pass gathers and sums the rows of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import row_bytes
from fusco.core.topology import Topology
from fusco.cuda.kernels.library import library_of
from fusco.cuda.kernels.weighted_sum import weighted_sum as weighted_sum_on_cuda
from fusco.reference.weighted_sum import weighted_sum as weighted_sum_on_cpu


@dataclass(frozen=True)
class BaselineHandle:
    """State of a dispatch that combine needs.

    Attributes:
        pair_to_row: int64 (num_tokens, num_topk), the row sent for each pair; those without expert are not sent.
        arrived_to_row: int64 (num_rows,), the expert-major row of each row in order of arrival.
        send_counts: rows sent to each rank.
        receive_counts: rows received from each rank.
        topk_weights: (num_tokens, num_topk).

    """

    pair_to_row: torch.Tensor
    arrived_to_row: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    topk_weights: torch.Tensor


class BaselineShuffle:
    """Dispatch and combine with ``index_select`` and ``all_to_all_single`` of torch.distributed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        placement: ExpertPlacement,
        topology: Topology,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group, self._rank, self._world_size = group, dist.get_rank(group), topology.world_size
        self._rank_to_node = topology.rank_to_node
        # Experts by (rank, local expert), the order in which a rank sends. The last entry is that of -1: no expert.
        order = [expert for experts in placement.rank_to_experts for expert in experts]
        positions = torch.tensor(order, device="cpu").argsort().tolist()
        self._num_experts = placement.num_experts
        self._expert_to_position = torch.tensor([*positions, self._num_experts], dtype=torch.int32, device=device)
        self._edges = torch.arange(self._num_experts + 1, dtype=torch.int32, device=device)
        self._per_rank = [len(experts) for experts in placement.rank_to_experts]
        self._num_local = self._per_rank[self._rank]
        num_counts = len(self._edges) + self._world_size * self._num_local
        is_cuda = torch.device(device).type == "cuda"
        self._counts = torch.empty(num_counts, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self.profile = CallProfile()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], BaselineHandle]:
        """Return expert-major rows as ``Communicator.dispatch`` does, the rows of each local expert, and a handle."""
        self.profile = CallProfile("baseline dispatch")
        with self.profile.spend("planning"):
            positions, token_order = self._expert_to_position[topk_idx.view(-1)].sort(stable=True)
            ends = torch.searchsorted(positions, self._edges)  # of the experts before each: pairs without one are last
            sent = ends.diff()
            received = sent.new_empty(self._world_size, self._num_local)
            dist.all_to_all_single(
                received.view(-1), sent, [self._num_local] * self._world_size, self._per_rank, group=self._group
            )
            copied = self._copy_to_host(ends, received)
            shift = _expert_major_shift(received)
            numbers = torch.arange(len(token_order), device=x.device)
            pair_to_row = torch.empty_like(token_order).scatter_(0, token_order, numbers)
            if copied:
                copied.synchronize()
            send_counts, from_ranks = self._counts_on_host()
            receive_counts = list(map(sum, from_ranks))
            num_rows = sum(receive_counts)
            self._count_bytes(send_counts, x)
            self.profile.internode_metadata_bytes = sum(self._leaving(self._per_rank)) * sent.itemsize
        with self.profile.spend("rearranging"):
            to_send = x.index_select(0, token_order[: sum(send_counts)] // topk_idx.shape[1])
        with self.profile.spend("wire"):
            arrived = x.new_empty(num_rows, *x.shape[1:])
            dist.all_to_all_single(arrived, to_send, receive_counts, send_counts, group=self._group)
        with self.profile.spend("rearranging"):
            numbers = torch.arange(num_rows, device=x.device)
            rows = arrived.index_select(0, numbers - _repeat(shift.T, received.T, num_rows))
            arrived_to_row = numbers + _repeat(shift, received, num_rows)
        handle = BaselineHandle(
            pair_to_row.view(topk_idx.shape), arrived_to_row, send_counts, receive_counts, topk_weights
        )
        return rows, list(map(sum, zip(*from_ranks, strict=True))), handle

    def combine(self, y: torch.Tensor, handle: BaselineHandle) -> torch.Tensor:
        """Return token-major rows, weighted and summed in float32."""
        self.profile = CallProfile("baseline combine")
        with self.profile.spend("rearranging"):
            to_send = y.index_select(0, handle.arrived_to_row)
        self._count_bytes(handle.receive_counts, y)
        with self.profile.spend("wire"):
            arrived = y.new_empty(sum(handle.send_counts), *y.shape[1:])
            dist.all_to_all_single(arrived, to_send, handle.send_counts, handle.receive_counts, group=self._group)
        with self.profile.spend("rearranging"):
            return weighted_sum(arrived, handle.pair_to_row, handle.topk_weights)

    def _copy_to_host(self, ends: torch.Tensor, received: torch.Tensor) -> torch.cuda.Event | None:
        """Begin to copy the counts, on CUDA on the current stream; return an event to wait for."""
        self._counts.copy_(torch.cat([ends, received.view(-1)]), non_blocking=True)
        return torch.cuda.current_stream().record_event() if received.is_cuda else None

    def _counts_on_host(self) -> tuple[list[int], list[list[int]]]:
        """Return the rows sent to each rank, and those received from each rank for each local expert."""
        counts: list[int] = self._counts.tolist()
        send_counts = [counts[last] - counts[first] for first, last in pairwise(accumulate(self._per_rank, initial=0))]
        first = len(self._edges)
        from_ranks = [
            counts[first + rank * self._num_local : first + (rank + 1) * self._num_local]
            for rank in range(self._world_size)
        ]
        return send_counts, from_ranks

    def _count_bytes(self, rank_to_rows: list[int], rows: torch.Tensor) -> None:
        size = row_bytes(rows)
        leaving = sum(self._leaving(rank_to_rows))
        self.profile.internode_row_bytes = leaving * size
        self.profile.intranode_row_bytes = (sum(rank_to_rows) - leaving - rank_to_rows[self._rank]) * size

    def _leaving(self, rank_to_count: list[int]) -> list[int]:
        local_node = self._rank_to_node[self._rank]
        return [count for node, count in zip(self._rank_to_node, rank_to_count, strict=True) if node != local_node]


def weighted_sum(rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``fusco.reference.weighted_sum``; one kernel on CUDA, on the current stream."""
    if not rows.is_cuda:
        return weighted_sum_on_cpu(rows, row_idx, weights)
    stream = torch.cuda.current_stream().cuda_stream
    return weighted_sum_on_cuda(library_of(rows.device), stream, rows, row_idx, weights)


def _expert_major_shift(counts: torch.Tensor) -> torch.Tensor:
    """Return by how many rows each block moves from the order of (source, expert) to that of (expert, source).

    >>> _expert_major_shift(torch.tensor([[1, 2], [3, 4]])).tolist()  # blocks begin at 0, 1, 3, 6, then at 0, 4, 1, 6
    [[0, 3], [-2, 0]]
    """
    before = counts.view(-1).cumsum(0).view(counts.shape) - counts
    columns = counts.T.contiguous()
    return (columns.view(-1).cumsum(0).view(columns.shape) - columns).T - before


def _repeat(values: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    return values.reshape(-1).repeat_interleave(counts.reshape(-1), output_size=total)

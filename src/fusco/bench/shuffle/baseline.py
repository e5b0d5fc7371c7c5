"""Baseline: permute, ``all_to_all_single``, permute, and the same back. It also serves as reference result.

Written as well as these operations allow. Indices come from one sort and from counts. Ranks exchange the counts of all
experts, and one copy brings them to the host: the only wait of a dispatch, and a combine has none. What the host
computes of them it computes while rows travel. One pass gathers and sums the rows of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import accumulation_dtype, row_bytes
from fusco.core.topology import Topology
from fusco.cuda.kernels.library import library_of
from fusco.cuda.kernels.weighted_sum import weighted_sum as weighted_sum_on_cuda


@dataclass(frozen=True)
class BaselineHandle:
    """State of a dispatch that combine needs."""

    # int64 (num_tokens, num_topk), the row sent for each pair; those without expert are not sent
    pair_to_row: torch.Tensor
    arrived_to_row: torch.Tensor  # int64 (num_rows,), the expert-major row of each row in order of arrival
    send_counts: list[int]  # rows sent to each rank
    receive_counts: list[int]  # rows received from each rank
    topk_weights: torch.Tensor  # (num_tokens, num_topk)


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
        # The ends of the experts' rows among those sent, then the rows received of each (rank, local expert).
        num_counts = len(self._edges) + self._world_size * self._num_local
        self._counts = torch.empty(num_counts, dtype=torch.int64, device=device)
        is_cuda = self._counts.is_cuda
        self._counts_on_host = torch.empty(num_counts, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._numbers = torch.arange(0, device=device)
        self.profile = CallProfile()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], BaselineHandle]:
        """Return expert-major rows as ``Communicator.dispatch`` does, the rows of each local expert, and a handle."""
        self.profile = CallProfile("baseline dispatch")
        with self.profile.spend("planning"):
            positions, token_order = self._expert_to_position[topk_idx.view(-1)].sort(stable=True)
            copied = self._exchange_counts(positions)
            if len(self._numbers) < len(token_order):
                self._numbers = torch.arange(len(token_order), device=x.device)
            pair_to_row = torch.empty_like(token_order).scatter_(0, token_order, self._numbers[: len(token_order)])
            if copied:
                copied.synchronize()
            send_counts, received = self._read_counts()
            receive_counts: list[int] = received.sum(1).tolist()
            self._count_bytes(send_counts, x)
            self.profile.internode_metadata_bytes = sum(self._leaving(self._per_rank)) * self._counts.itemsize
        with self.profile.spend("rearranging"):
            to_send = x.index_select(0, token_order[: sum(send_counts)] // topk_idx.shape[1])
        with self.profile.spend("wire"):
            arrived = x.new_empty(sum(receive_counts), *x.shape[1:])
            dist.all_to_all_single(arrived, to_send, receive_counts, send_counts, group=self._group)
        with self.profile.spend("rearranging"):
            row_to_arrived, arrived_to_row = _expert_major(received, x.device)
            rows = arrived.index_select(0, row_to_arrived)
        handle = BaselineHandle(
            pair_to_row.view(topk_idx.shape), arrived_to_row, send_counts, receive_counts, topk_weights
        )
        return rows, received.sum(0).tolist(), handle

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

    def _exchange_counts(self, positions: torch.Tensor) -> torch.cuda.Event | None:
        """Exchange counts and begin to copy them to the host; on CUDA, return the event of the copy's end."""
        ends, received = self._counts[: len(self._edges)], self._counts[len(self._edges) :]
        torch.searchsorted(positions, self._edges, out=ends)  # rows before each expert; pairs without one are last
        dist.all_to_all_single(
            received, ends.diff(), [self._num_local] * self._world_size, self._per_rank, group=self._group
        )
        self._counts_on_host.copy_(self._counts, non_blocking=True)
        return torch.cuda.current_stream().record_event() if received.is_cuda else None

    def _read_counts(self) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the rows sent to each rank, and those received, (world_size, num_local_experts)."""
        counts = self._counts_on_host.numpy()
        ends = counts[: len(self._edges)][np.cumsum([0, *self._per_rank])]
        return np.diff(ends).tolist(), counts[len(self._edges) :].reshape(self._world_size, self._num_local)

    def _count_bytes(self, rank_to_rows: list[int], rows: torch.Tensor) -> None:
        size = row_bytes(rows)
        leaving = sum(self._leaving(rank_to_rows))
        self.profile.internode_row_bytes = leaving * size
        self.profile.intranode_row_bytes = (sum(rank_to_rows) - leaving - rank_to_rows[self._rank]) * size

    def _leaving(self, rank_to_count: list[int]) -> list[int]:
        local_node = self._rank_to_node[self._rank]
        return [count for node, count in zip(self._rank_to_node, rank_to_count, strict=True) if node != local_node]


def weighted_sum(rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``weighted_sum_on_cpu``; one kernel on CUDA, on the current stream."""
    if not rows.is_cuda:
        return weighted_sum_on_cpu(rows, row_idx, weights)
    stream = torch.cuda.current_stream().cuda_stream
    return weighted_sum_on_cuda(library_of(rows.device), stream, rows, row_idx, weights)


def weighted_sum_on_cpu(rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of the rows that each token names, in the dtype of the rows.

    Args:
        rows: (num_rows, hidden).
        row_idx: int64 (num_tokens, num_topk); an index outside of the rows contributes nothing.
        weights: (num_tokens, num_topk). Products and sums are float32 (float64 for float64 rows), in order of k.

    >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    >>> weighted_sum_on_cpu(rows, torch.tensor([[1, 0], [0, -1]]), torch.tensor([[0.5, 2.0], [3.0, 1.0]])).tolist()
    [[7.0, 14.0], [3.0, 6.0]]
    """
    wide = accumulation_dtype(rows.dtype)
    out = torch.zeros(len(row_idx), rows.shape[1], dtype=wide, device=rows.device)
    if not len(rows):
        return out.to(rows.dtype)
    is_there = (row_idx >= 0) & (row_idx < len(rows))
    for k in range(row_idx.shape[1]):
        terms = rows.index_select(0, row_idx[:, k].where(is_there[:, k], 0)).to(wide)
        out += terms.mul_(weights[:, k, None].to(wide)).masked_fill_(~is_there[:, k, None], 0)
    return out.to(rows.dtype)


def _expert_major(counts: npt.NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the received row of each expert-major one and the reverse, computed on the host while rows travel.

    Rows are received in order of (source, expert), with ``counts`` of each; the expert-major order is by (expert,
    source), so each block is shifted as a whole.

    >>> row_to_arrived, arrived_to_row = _expert_major(np.array([[1, 2], [1, 0]]), torch.device("cpu"))
    >>> row_to_arrived.tolist(), arrived_to_row.tolist()
    ([0, 3, 1, 2], [0, 2, 3, 1])
    """
    columns = counts.T
    shift = (columns.cumsum().reshape(columns.shape) - columns).T - (counts.cumsum().reshape(counts.shape) - counts)
    num_rows = int(counts.sum())
    indices = torch.empty(2, num_rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    numbers, on_host = np.arange(num_rows), indices.numpy()
    np.subtract(numbers, shift.T.repeat(columns.reshape(-1)), out=on_host[0])
    np.add(numbers, shift.repeat(counts.reshape(-1)), out=on_host[1])
    row_to_arrived, arrived_to_row = indices.to(device, non_blocking=True)
    return row_to_arrived, arrived_to_row

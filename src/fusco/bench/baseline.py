"""Baseline: permute, ``all_to_all_single``, permute, and the same back. It also serves as reference result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import row_bytes
from fusco.core.topology import Topology


@dataclass(frozen=True)
class BaselineHandle:
    """State of a dispatch that combine needs."""

    token_order: torch.Tensor  # int64 (num_pairs,): position in topk_idx.view(-1) of each row sent
    expert_order: torch.Tensor  # int64 (num_rows,): received position of each expert-major row
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
        self._group, self._placement = group, placement
        self._rank, self._world_size = dist.get_rank(group), topology.world_size
        self._rank_to_node = topology.rank_to_node
        # Experts by (rank, local expert), the order in which a rank sends.
        order = [expert for experts in placement.rank_to_experts for expert in experts]
        self._expert_to_position = torch.tensor(order, device=device).argsort()
        self._device = device
        self._per_rank = [len(experts) for experts in placement.rank_to_experts]
        self.profile = CallProfile()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], BaselineHandle]:
        """Return expert-major rows as ``Communicator.dispatch`` does, the rows of each local expert, and a handle."""
        self.profile = CallProfile("baseline dispatch")
        with self.profile.spend("planning"):
            position = self._expert_to_position[topk_idx.view(-1)].masked_fill_(topk_idx.view(-1) < 0, -1)
            token_order = position.argsort(stable=True)[int((position < 0).sum()) :]
            sent = torch.bincount(position[token_order], minlength=self._placement.num_experts)
            num_local = self._per_rank[self._rank]
            received = sent.new_empty(self._world_size * num_local)
            dist.all_to_all_single(received, sent, [num_local] * self._world_size, self._per_rank, group=self._group)
            received = received.view(self._world_size, num_local)
            send_counts = [int(part.sum()) for part in torch.split(sent.cpu(), self._per_rank)]
            receive_counts = received.sum(1).tolist()
            # Received rows are in order of (source, expert); the expert-major order is by (expert, source).
            expert_of_row = (
                torch.arange(num_local, device=self._device)
                .repeat(self._world_size)
                .repeat_interleave(received.view(-1))
            )
            expert_order = expert_of_row.argsort(stable=True)
            self._count_bytes(send_counts, x)
            self.profile.internode_metadata_bytes = sum(self._leaving(self._per_rank)) * sent.itemsize
        with self.profile.spend("rearranging"):
            to_send = x.index_select(0, token_order // topk_idx.shape[1])
        with self.profile.spend("wire"):
            arrived = x.new_empty(sum(receive_counts), *x.shape[1:])
            dist.all_to_all_single(arrived, to_send, receive_counts, send_counts, group=self._group)
        with self.profile.spend("rearranging"):
            rows = arrived.index_select(0, expert_order)
        handle = BaselineHandle(token_order, expert_order, send_counts, receive_counts, topk_weights)
        return rows, received.sum(0).tolist(), handle

    def combine(self, y: torch.Tensor, handle: BaselineHandle) -> torch.Tensor:
        """Return token-major rows, weighted and summed in float32."""
        self.profile = CallProfile("baseline combine")
        num_tokens, num_topk = handle.topk_weights.shape
        with self.profile.spend("rearranging"):
            to_send = y.index_select(0, handle.expert_order.argsort())
        self._count_bytes(handle.receive_counts, y)
        with self.profile.spend("wire"):
            arrived = y.new_empty(len(handle.token_order), *y.shape[1:])
            dist.all_to_all_single(arrived, to_send, handle.send_counts, handle.receive_counts, group=self._group)
        with self.profile.spend("rearranging"):
            if len(handle.token_order) == num_tokens * num_topk:
                by_token = arrived.index_select(0, handle.token_order.argsort())
            else:
                by_token = y.new_zeros(num_tokens * num_topk, *y.shape[1:])
                by_token[handle.token_order] = arrived
        wide = torch.promote_types(y.dtype, torch.float32)
        weights = handle.topk_weights.to(wide)[:, None, :]
        return torch.bmm(weights, by_token.view(num_tokens, num_topk, -1).to(wide)).squeeze(1).to(y.dtype)

    def _count_bytes(self, rank_to_rows: list[int], rows: torch.Tensor) -> None:
        size = row_bytes(rows)
        leaving = sum(self._leaving(rank_to_rows))
        self.profile.internode_row_bytes = leaving * size
        self.profile.intranode_row_bytes = (sum(rank_to_rows) - leaving - rank_to_rows[self._rank]) * size

    def _leaving(self, rank_to_count: list[int]) -> list[int]:
        local_node = self._rank_to_node[self._rank]
        return [count for node, count in zip(self._rank_to_node, rank_to_count, strict=True) if node != local_node]

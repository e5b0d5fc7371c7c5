"""The reference dispatcher: permute, ``all_to_all_single``, permute, and the inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from fusco.fsdp.dispatcher import Arrival


@dataclass(frozen=True)
class _Ticket:
    """The return path of one dispatch.

    ``sent`` has the flat positions token * num_topk + k in sending order; ``arrived`` maps expert-major rows to
    positions in arrival order.
    """

    sent: torch.Tensor
    arrived: torch.Tensor
    topk_weights: torch.Tensor
    num_sent: list[int]
    num_received: list[int]


class TorchDispatcher:
    """Two exchanges of duplicated rows with a permutation on either side, all differentiated by PyTorch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use the group of the ranks among which experts are distributed: ``EPMesh.ep_group``."""
        self.group, self._num_ranks = group, group.size()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts; see ``Dispatcher``. Waits on the host once, for the counts."""
        expert_of_pair = topk_idx.reshape(-1)
        counts = expert_of_pair.new_zeros(1 + num_experts)  # the first is of those without an expert
        to_each = counts.scatter_add_(0, expert_of_pair + 1, torch.ones_like(expert_of_pair))[1:]
        from_each = torch.empty_like(to_each)
        dist.all_to_all_single(from_each, to_each, group=self.group)

        by_source = from_each.view(self._num_ranks, -1)
        num_sent, num_received = torch.stack([to_each.view(self._num_ranks, -1).sum(1), by_source.sum(1)]).tolist()
        sent = torch.argsort(expert_of_pair, stable=True)[len(expert_of_pair) - sum(num_sent) :]
        rows = self._exchange(x[sent // topk_idx.shape[1]], num_received, num_sent)
        local_expert = torch.arange(by_source.shape[1], device=x.device).repeat(self._num_ranks)
        expert_of_row = local_expert.repeat_interleave(by_source.reshape(-1), output_size=sum(num_received))
        arrived = torch.argsort(expert_of_row, stable=True)
        return Arrival(rows[arrived], by_source.sum(0), _Ticket(sent, arrived, topk_weights, num_sent, num_received))

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens; see ``Dispatcher``."""
        ticket: _Ticket = arrival.ticket
        num_tokens, num_topk = ticket.topk_weights.shape
        as_arrived = torch.empty_like(ticket.arrived)
        as_arrived[ticket.arrived] = torch.arange(len(as_arrived), device=y.device)
        returned = self._exchange(y[as_arrived], ticket.num_sent, ticket.num_received)
        weighted = returned * ticket.topk_weights.reshape(-1)[ticket.sent, None]
        out = weighted.new_zeros(num_tokens, y.shape[1])
        return out.index_add(0, ticket.sent // num_topk, weighted).to(y.dtype)

    def synchronize(self) -> None:
        """Wait for the device; the process group detects failures."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()

    def _exchange(self, rows: torch.Tensor, num_received: list[int], num_sent: list[int]) -> torch.Tensor:
        # PyTorch 2.11 has no kernel for the differentiable one in inference mode.
        exchange = all_to_all_single_autograd if torch.is_grad_enabled() else all_to_all_single
        moved: torch.Tensor = exchange(rows.contiguous(), num_received, num_sent, self.group)
        return moved.wait() if hasattr(moved, "wait") else moved

"""Forced balance, for benchmarks: every expert gets equally many rows, whatever the router chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.fsdp.dispatcher import Arrival, Dispatcher


@dataclass(frozen=True, eq=False)
class BalancedDispatcher:
    """Wraps a dispatcher and sends tokens to experts in turn, with the router's weights.

    It shows what training would cost if loads were even; a model does not learn from it what it computes. The experts
    of a token differ as long as there are ``num_topk`` of them, and slots without an expert (-1) stay.
    """

    inner: Dispatcher

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks among which experts are distributed."""
        return self.inner.group

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to experts in turn; see ``Dispatcher``."""
        return self.inner.dispatch(x, self._in_turn(topk_idx, num_experts), topk_weights, num_experts)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens; see ``Dispatcher``."""
        return self.inner.combine(y, arrival)

    def synchronize(self) -> None:
        """Wait until all rows have arrived; see ``Dispatcher``."""
        self.inner.synchronize()

    def _in_turn(self, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return ids like ``topk_idx``; ranks begin at different experts, so that remainders even out as well."""
        first = self.group.rank() * topk_idx.numel()
        in_turn = (first + torch.arange(topk_idx.numel(), device=topk_idx.device)) % num_experts
        return torch.where(topk_idx < 0, topk_idx, in_turn.view_as(topk_idx).to(topk_idx.dtype))

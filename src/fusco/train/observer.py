"""Measurements inside a step: the time of dispatch and combine, forward and backward, and the routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusco.bench.prefill.dispatchers import TimedDispatcher
from fusco.fsdp.dispatcher import Arrival

SECTIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


@dataclass
class ObservingDispatcher(TimedDispatcher):
    """Wraps a dispatcher and measures its calls.

    A section lasts until the verb returns, on CUDA until its work on the stream is done; it includes waiting for other
    ranks and for the host. The backward sections last from the gradient of the verb's output to that of its input.
    Verbs that activation checkpointing repeats count as forward.
    """

    num_layers: int  # calls of a forward pass; later ones in a step are recomputations and not recorded
    keeps_routing: bool = False  # whether to record ``topk_idx``
    # for each layer of this step, the rows of each local expert
    num_rows: list[torch.Tensor] = field(default_factory=list)
    topk_idx: list[torch.Tensor] = field(default_factory=list)  # for each layer of this step, the routing, if recorded

    def start_step(self) -> None:
        """Drop the records of the previous step."""
        self.num_rows.clear()
        self.topk_idx.clear()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        x = self._mark_backward(x, "dispatch_backward")
        arrival = super().dispatch(x, topk_idx, topk_weights, num_experts)
        if len(self.num_rows) < self.num_layers:
            self.num_rows.append(arrival.num_rows_per_expert)
            if self.keeps_routing:
                self.topk_idx.append(topk_idx)
        rows = self._mark_backward(arrival.rows, "dispatch_backward")
        return Arrival(rows, arrival.num_rows_per_expert, arrival.ticket)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        out = super().combine(self._mark_backward(y, "combine_backward"), arrival)
        return self._mark_backward(out, "combine_backward")

    def _mark_backward(self, tensor: torch.Tensor, section: str) -> torch.Tensor:
        """Return the same tensor; the section is marked when its gradient is computed."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        marked: torch.Tensor = _MarkBackward.apply(tensor, lambda: self.clock.mark(section))  # type: ignore[no-untyped-call]
        return marked


class _MarkBackward(torch.autograd.Function):
    """Saves an empty tensor, so that activation checkpointing recomputes a block before the mark is made.

    Without it the block would be recomputed in the middle of a section, when the verb unpacks its saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: Callable[[], None]) -> torch.Tensor:
        ctx.mark = mark
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.detach()  # not a view, which FSDP would warn about

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        ctx.mark()
        return grad, None

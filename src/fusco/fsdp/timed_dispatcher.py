"""The time of dispatch and combine, forward and backward, measured around a dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fusco.core.stopwatch import SectionTimer
from fusco.fsdp.dispatcher import Arrival, BalancedArrival, CopyingDispatcher, Dispatcher

ArrivalT = TypeVar("ArrivalT", bound=Arrival)
SECTIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


@dataclass
class TimedDispatcher:
    """Wraps a dispatcher and measures its calls, for ``Metrics``.

    A section lasts until the verb returns, on CUDA until its work on the stream is done; it includes waiting for other
    ranks and for the host. The backward sections last from the gradient of the verb's output to that of its input.
    Verbs that activation checkpointing repeats count as forward.
    """

    inner: Dispatcher  # the dispatcher that moves the rows
    clock: SectionTimer

    @classmethod
    def on(cls, inner: Dispatcher, device_type: str) -> TimedDispatcher:
        """Wrap a dispatcher whose rows are on ``"cpu"`` or ``"cuda"``."""
        return cls(inner, SectionTimer(device_type))

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks among which experts are distributed."""
        return self.inner.group

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts; see ``Dispatcher``."""
        return self._timed(self.inner.dispatch, x, topk_idx, topk_weights, num_experts)

    def dispatch_balanced(self, x: torch.Tensor, *others: Any) -> BalancedArrival:
        """Send tokens to their experts or to copies; see ``CopyingDispatcher``."""
        return self._timed(cast("CopyingDispatcher", self.inner).dispatch_balanced, x, *others)

    def _timed(self, dispatch: Callable[..., ArrivalT], x: torch.Tensor, *others: Any) -> ArrivalT:
        x = self._mark_backward(x, "dispatch_backward")
        with self.clock.timed("dispatch"):
            arrival = dispatch(x, *others)
        return replace(arrival, rows=self._mark_backward(arrival.rows, "dispatch_backward"))

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens; see ``Dispatcher``."""
        y = self._mark_backward(y, "combine_backward")
        with self.clock.timed("combine"):
            out = self.inner.combine(y, arrival)
        return self._mark_backward(out, "combine_backward")

    def synchronize(self) -> None:
        """Wait until all rows have arrived; see ``Dispatcher``."""
        self.inner.synchronize()

    def _mark_backward(self, tensor: torch.Tensor, section: str) -> torch.Tensor:
        """Return the same tensor; the section is marked when its gradient is computed."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        return _MarkBackward.apply(tensor, lambda: self.clock.mark(section))  # type: ignore[no-untyped-call]


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

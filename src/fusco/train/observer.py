"""What happens inside a step: the time that dispatch and combine take, forward and backward, and the routing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fusco.fsdp.dispatcher import Arrival, Dispatcher

SECTIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


class Stopwatch:
    """Adds up the time between marks, by section: on CUDA by events on the current stream, or else by the clock."""

    def __init__(self, device_type: str) -> None:
        self._is_cuda = device_type == "cuda"
        self._marks: dict[str, list[Any]] = {}

    def mark(self, section: str) -> None:
        """Begin a section, or end the one that has begun."""
        if self._is_cuda:
            now: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        else:
            now = time.perf_counter()
        self._marks.setdefault(section, []).append(now)

    def take_s(self) -> dict[str, float]:
        """The seconds of every section since the last time; the device must have done what was marked."""
        times = {}
        for section in SECTIONS:
            marks = self._marks.pop(section, [])
            assert len(marks) % 2 == 0, f"{section} began and did not end"
            pairs = zip(marks[::2], marks[1::2], strict=True)
            times[section] = sum(
                start.elapsed_time(end) / 1e3 if self._is_cuda else end - start for start, end in pairs
            )
        return times


@dataclass
class ObservingDispatcher:
    """Another dispatcher, watched.

    A section lasts until the verb returns, on CUDA until its work on the stream is done: waiting for other ranks and
    for the host is part of it. The backward sections last from the gradient that arrives at the verb's output until the
    one that leaves its input. Verbs that activation checkpointing repeats count as forward.

    Attributes:
        inner: moves the rows.
        stopwatch: takes the times.
        num_layers: calls of a forward pass; what comes after them in a step is computed again and not noted twice.
        keeps_routing: whether to keep ``topk_idx``.
        num_rows: for each layer of this step, the rows of each local expert.
        topk_idx: for each layer of this step, the routing, if it is kept.

    """

    inner: Dispatcher
    stopwatch: Stopwatch
    num_layers: int
    keeps_routing: bool = False
    num_rows: list[torch.Tensor] = field(default_factory=list)
    topk_idx: list[torch.Tensor] = field(default_factory=list)

    @property
    def group(self) -> dist.ProcessGroup:
        """As the inner dispatcher."""
        return self.inner.group

    def start_step(self) -> None:
        """Forget the step before."""
        self.num_rows.clear()
        self.topk_idx.clear()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """As the inner dispatcher."""
        x = self._mark_backward(x, "dispatch_backward")
        self.stopwatch.mark("dispatch")
        arrival = self.inner.dispatch(x, topk_idx, topk_weights, num_experts)
        self.stopwatch.mark("dispatch")
        if len(self.num_rows) < self.num_layers:
            self.num_rows.append(arrival.num_rows_per_expert)
            if self.keeps_routing:
                self.topk_idx.append(topk_idx)
        rows = self._mark_backward(arrival.rows, "dispatch_backward")
        return Arrival(rows, arrival.num_rows_per_expert, arrival.ticket)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """As the inner dispatcher."""
        y = self._mark_backward(y, "combine_backward")
        self.stopwatch.mark("combine")
        out = self.inner.combine(y, arrival)
        self.stopwatch.mark("combine")
        return self._mark_backward(out, "combine_backward")

    def synchronize(self) -> None:
        """As the inner dispatcher."""
        self.inner.synchronize()

    def _mark_backward(self, tensor: torch.Tensor, section: str) -> torch.Tensor:
        """The same tensor; the section is marked when its gradient comes by."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        marked: torch.Tensor = _MarkBackward.apply(tensor, lambda: self.stopwatch.mark(section))  # type: ignore[no-untyped-call]
        return marked


class _MarkBackward(torch.autograd.Function):
    """Saves a tensor of no size, so that activation checkpointing has computed a block again before the mark is made.

    Without it the block would be computed again in the middle of a section, when the verb asks for what it saved.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: Callable[[], None]) -> torch.Tensor:
        ctx.mark = mark
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.detach()  # no view of it, which FSDP would warn of

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        ctx.mark()
        return grad, None

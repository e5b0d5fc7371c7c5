"""Dispatchers and layers of the variants, with the time of dispatch and combine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fusco.bench.prefill.iterations import CallClock
from fusco.fsdp import Arrival, TorchDispatcher


class TimedTransformersLayer:
    """Runs an ``EPImplementation``; what precedes its experts is "dispatch", what follows is "combine".

    Rows reach its experts by source rank, so a permutation of theirs is not in these sections.
    """

    def __init__(self, implementation: Any, clock: CallClock) -> None:
        self._implementation, self._clock = implementation, clock
        self._experts_forward, implementation.experts_forward = implementation.experts_forward, self._run_experts

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        self._clock.mark("dispatch")
        out: torch.Tensor = self._implementation(x, topk_idx, topk_weights)
        self._clock.mark("combine")
        return out

    def _run_experts(self, *arguments: torch.Tensor) -> torch.Tensor:
        self._clock.mark("dispatch")
        out: torch.Tensor = self._experts_forward(*arguments)
        self._clock.mark("combine")
        return out


class ShuffleDispatcher(TorchDispatcher):
    """Moves rows by an object that ``fusco bench shuffle`` compares fusco with, such as ``BaselineShuffle``."""

    def __init__(self, group: dist.ProcessGroup, shuffle: Any) -> None:
        super().__init__(group)
        self._shuffle = shuffle

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts."""
        assert num_experts % self.group.size() == 0
        rows, on_host, handle = self._shuffle.dispatch(x, topk_idx, topk_weights.float())
        # From pinned memory, as the host would wait for the stream otherwise.
        counts = torch.tensor(on_host, dtype=torch.int64, device="cpu", pin_memory=x.is_cuda)
        return Arrival(rows, counts.to(x.device, non_blocking=True), handle)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens."""
        out: torch.Tensor = self._shuffle.combine(y, arrival.ticket)
        return out


class ReferenceDispatcher(TorchDispatcher):
    """PyTorch's all-to-all with weights in float32, and therefore sums in float32 that are rounded once."""

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts."""
        return super().dispatch(x, topk_idx, topk_weights.float(), num_experts)

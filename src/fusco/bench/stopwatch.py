"""Time on the device, from a moment at which all ranks' devices have met."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

_HEAD_START_CYCLES = 1_000_000  # about half a millisecond, in which the host enqueues what is to be timed
_NUM_WARM_UPS = 3


class Stopwatch:
    """Times work on the current stream, ranks together; the group must have NCCL for CUDA tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._token = torch.zeros(1, device="cuda")

    def times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """This rank's times, in milliseconds, after a few that are not counted."""
        marks = []
        for _ in range(_NUM_WARM_UPS + num_iterations):
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  nothing public waits
            dist.all_reduce(self._token, group=self._group)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks[_NUM_WARM_UPS:]]

    def median_ms(self, work: Callable[[], object], num_iterations: int) -> float:
        """The slowest rank's median."""
        slowest = torch.tensor([median(self.times_ms(work, num_iterations))])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return float(slowest)

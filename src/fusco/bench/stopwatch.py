"""How long work takes, ranks together: on the device, from a moment at which all devices have met, or on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

_HEAD_START_CYCLES = 1_000_000  # about half a millisecond, in which the host enqueues what is to be timed
_NUM_WARM_UPS = 3


class Timing(Protocol):
    """Either stopwatch."""

    def times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """This rank's times, in milliseconds, after a few that are not counted."""

    def median_ms(self, work: Callable[[], object], num_iterations: int) -> float:
        """The slowest rank's median, the same on all ranks."""


class Stopwatch:
    """Times work on the current stream, ranks together; the group must have NCCL for CUDA tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._token = torch.zeros(1, dtype=torch.float32, device="cuda")

    def meet(self) -> None:
        """Have the current stream wait, after a head start for the host, until all ranks' devices are there."""
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  nothing public waits
        dist.all_reduce(self._token, group=self._group)

    def times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """This rank's times, in milliseconds, after a few that are not counted."""
        marks = []
        for _ in range(_NUM_WARM_UPS + num_iterations):
            self.meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks[_NUM_WARM_UPS:]]

    def median_ms(self, work: Callable[[], object], num_iterations: int) -> float:
        """The slowest rank's median."""
        return _slowest(median(self.times_ms(work, num_iterations)), self._group)


class HostStopwatch:
    """Times work on the host, from a barrier of all ranks on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """This rank's times, in milliseconds, after a few that are not counted."""
        times = []
        for _ in range(_NUM_WARM_UPS + num_iterations):
            dist.barrier(self._group)
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        return times[_NUM_WARM_UPS:]

    def median_ms(self, work: Callable[[], object], num_iterations: int) -> float:
        """The slowest rank's median."""
        return _slowest(median(self.times_ms(work, num_iterations)), self._group)


def _slowest(time_ms: float, group: dist.ProcessGroup) -> float:
    slowest = torch.tensor([time_ms], dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)

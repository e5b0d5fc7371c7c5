"""Times of work that start on all ranks together, of variants in turn, and of the cores."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from fusco.control.bootstrap import host_identity
from fusco.core.stopwatch import Stopwatch

_HEAD_START_CYCLES = 1_000_000  # about half a millisecond, in which the host enqueues what is to be timed
_NUM_WARM_UPS = 3
NUM_CALLS_IN_A_ROW = 20
_MIN_LOOPS, _MAX_LOOPS, _LOOPS_S = 3, 20, 0.2  # repetitions of 20 calls: as many as the seconds allow
# Ranks of a host begin when its clock reaches the next multiple, which is at least the slack away.
_START_PERIOD_NS, _START_SLACK_NS = 2_000_000, 500_000
_IDLE = slice(3, 5)  # fields of /proc/stat, proc(5): idle, and waiting for a disk
_NUM_FIELDS = 8  # those after steal are counted in earlier ones
_Variant = TypeVar("_Variant")
_Measured = TypeVar("_Measured")


class RankTimer:
    """Times work that all ranks begin together; on CUDA on the current stream, and the group must have NCCL."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        """Make the timer; a collective of the group."""
        self._group, self._stopwatch = group, Stopwatch(device_type)
        self._token = torch.zeros(1, dtype=torch.float32, device=device_type)
        host = zlib.crc32(host_identity().encode())
        largest = torch.tensor([host, -host], device=device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        self._is_one_host = not largest.sum()  # clocks of several differ by any part of a period

    def align(self) -> None:
        """Wait for all ranks: on the host, or on the current stream after a head start for the host."""
        if not self._stopwatch.is_cuda:
            dist.barrier(self._group)
            return
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  nothing public waits
        dist.all_reduce(self._token, group=self._group)

    def times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """Return this rank's times in milliseconds, after a few that are not counted."""
        marks = []
        for _ in range(_NUM_WARM_UPS + num_iterations):
            self.align()
            start = self._stopwatch.mark()
            work()
            marks.append((start, self._stopwatch.mark()))
        if self._stopwatch.is_cuda:
            torch.cuda.synchronize()
        return [self._stopwatch.elapsed_ms(start, end) for start, end in marks[_NUM_WARM_UPS:]]

    def loop_times_ms(self, work: Callable[[], object]) -> list[float]:
        """Return the host's time for each of 20 calls in a row that nothing interrupts, up to the end of the last one.

        One value for each of 3 to 20 repetitions, as many as fit in 0.2 s, after one that is not counted.
        """
        loop_s = torch.tensor([self.host_times_ms(work, NUM_CALLS_IN_A_ROW, 1)[0] / 1e3], device=self._token.device)
        dist.all_reduce(loop_s, dist.ReduceOp.MAX, group=self._group)
        num_loops = min(_MAX_LOOPS, max(_MIN_LOOPS, int(_LOOPS_S / float(loop_s))))
        return [each / NUM_CALLS_IN_A_ROW for each in self.host_times_ms(work, NUM_CALLS_IN_A_ROW, num_loops)]

    def idle_times_ms(self, work: Callable[[], object], num_iterations: int) -> list[float]:
        """Return the host's time for each call alone: from idle devices until the device has completed it."""
        return self.host_times_ms(work, 1, _NUM_WARM_UPS + num_iterations)[_NUM_WARM_UPS:]

    def host_times_ms(self, work: Callable[[], object], num_calls: int = 1, num_repeats: int = 1) -> list[float]:
        """Return the host's times for a number of calls, each from idle devices until the device has completed them."""
        finish: Callable[[], None] = torch.cuda.synchronize if self._stopwatch.is_cuda else lambda: None
        times = []
        for _ in range(num_repeats):
            finish()
            dist.barrier(self._group)
            finish()
            if self._is_one_host:
                _wait_for_next_period()
            start = time.perf_counter()
            for _ in range(num_calls):
                work()
            finish()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def least_s(self, work: Callable[[], object], num_calls: int, num_repeats: int) -> float:
        """Return the host's seconds of one call on the slowest rank, the least of some repetitions after a first call.

        The same on all ranks.
        """
        work()
        times = torch.tensor(self.host_times_ms(work, num_calls, num_repeats), device=self._token.device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        return float(times.min()) / num_calls / 1e3

    def median_ms(self, work: Callable[[], object], num_iterations: int) -> float:
        """Return the slowest rank's median, the same on all ranks."""
        slowest = torch.tensor([median(self.times_ms(work, num_iterations))], dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return float(slowest)


def _wait_for_next_period() -> None:
    """Wait for a moment that ranks of a host share: some ranks leave a barrier tens of microseconds after others."""
    begin = ((time.monotonic_ns() + _START_SLACK_NS) // _START_PERIOD_NS + 1) * _START_PERIOD_NS
    while time.monotonic_ns() < begin:
        pass


@dataclass(frozen=True)
class CoreTimes:
    """Core-seconds of this process, of all processes and the kernel, and of all cores, busy or idle.

    Those of the machine have steps of 10 ms.
    """

    process_s: float = 0.0
    busy_s: float = 0.0
    all_s: float = 0.0

    @classmethod
    def now(cls) -> CoreTimes:
        """Return the times since this process, and this machine, started."""
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        ticks = list(map(int, line.split()[1 : 1 + _NUM_FIELDS]))
        per_second = os.sysconf("SC_CLK_TCK")
        return cls(time.process_time(), (sum(ticks) - sum(ticks[_IDLE])) / per_second, sum(ticks) / per_second)

    def since(self, start: CoreTimes) -> CoreTimes:
        """Return what has passed since ``start``."""
        # Rounded, so that busy cores are not busier than all of them by an error of float64.
        busy_s, all_s = (
            round(now - before, 6) for now, before in ((self.busy_s, start.busy_s), (self.all_s, start.all_s))
        )
        return CoreTimes(self.process_s - start.process_s, busy_s, all_s)


def others_share(of_ranks: Sequence[Sequence[CoreTimes]]) -> float:
    """Return the share of the cores' time that was spent on other processes than the ranks.

    ``of_ranks`` are, by rank, the times of the same calls; all ranks are on this machine.

    >>> others_share([[CoreTimes(0.2, 0.9, 1.0)], [CoreTimes(0.3, 0.9, 1.0)]])
    0.4
    """
    process_s = sum(times.process_s for rank in of_ranks for times in rank)
    busy_s, all_s = (sum(getattr(times, name) for times in of_ranks[0]) for name in ("busy_s", "all_s"))
    return max(0.0, round((busy_s - process_s) / all_s, 3)) if all_s else 0.0


@contextmanager
def captured(work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Run the work once, capture it, and yield what replays it; all replays have ended after the block."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In the other modes of a capture NCCL's watchdog, another thread, may not query its events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    yield graph.replay
    torch.cuda.synchronize()


def measure_in_turn(
    variants: Mapping[str, _Variant],
    measure: Callable[[_Variant], _Measured],
    advance: Callable[[], None],
    *,
    num_warm_ups: int,
    num_iterations: int,
) -> dict[str, list[_Measured]]:
    """Measure all variants in every iteration, and return the measurements of each, without those of warm-ups.

    ``advance`` is called after every iteration.

    >>> times = iter([9, 8, 1, 2])
    >>> measure_in_turn({"a": 0, "b": 0}, lambda _: next(times), print, num_warm_ups=1, num_iterations=1)
    <BLANKLINE>
    <BLANKLINE>
    {'a': [1], 'b': [2]}
    """
    found: dict[str, list[_Measured]] = {name: [] for name in variants}
    for _ in range(num_warm_ups + num_iterations):
        for name, variant in variants.items():
            found[name].append(measure(variant))
        advance()
    return {name: measured[num_warm_ups:] for name, measured in found.items()}


def made(name: str, make: Callable[[], _Variant], *, is_peer: bool) -> _Variant | None:
    """Return what ``make`` does; ``None``, with a warning, for a variant of another library that cannot be set up."""
    try:
        return make()
    except Exception as error:  # another library may raise anything
        if not is_peer:
            raise
        warnings.warn(f"{name} could not be set up, and is left out: {error!r}", stacklevel=2)
        return None


def slowest_median(per_rank: Iterable[Sequence[float]], digits: int = 3) -> float:
    """Return the median over iterations of the slowest rank's value, rounded.

    >>> slowest_median([[1.0, 5.0, 2.0], [3.0, 1.0, 1.0]])
    3.0
    """
    slowest: list[float] = [max(of_iteration) for of_iteration in zip(*per_rank, strict=True)]
    return round(median(slowest), digits)

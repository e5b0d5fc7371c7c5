"""Each timed prefill of each rank, with what may explain that it took long."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fusco.core.stopwatch import SectionTimer

_OUTLIER = 1.3  # times the median
_MIB = 1 << 20


class CallClock(SectionTimer):
    """Times of calls by the host's clock, and by the device's while it is on."""

    is_on = False

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.calls: list[tuple[str, float]] = []  # a name and seconds, for each begin and each end

    def mark(self, section: str) -> None:
        """Begin a call, or end the one that has begun."""
        self.calls.append((section, time.perf_counter()))
        super().mark(section)


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One prefill on one rank, by the host's clock; waits of the host are in the calls that wait."""

    ms: float  # from a barrier until the host has the first tokens
    dispatch_ms: float  # in calls of dispatch
    combine_ms: float  # in calls of combine
    rest_ms: float  # from the end of the last call: the last layers, and the wait for the device
    longest: str  # which call took longest
    longest_ms: float  # and how long
    cpu_ms: float  # processor time of this thread
    gc_ms: float  # Python's garbage collections
    preemptions: int  # involuntary context switches of this thread
    page_faults: int  # of this thread
    device_allocations: int  # segments that PyTorch took from the device or gave back
    device_growth_bytes: int  # by how much the free memory of the device fell, other processes included


def measure(align: Callable[[], object], work: Callable[[], object], clock: CallClock, device: str) -> Iteration:
    """Run one prefill behind what aligns the ranks; what is counted around both is outside its time."""
    before, used = resource.getrusage(resource.RUSAGE_THREAD), _device_memory(device)
    with _collections() as collections_s:
        align()
        clock.calls.clear()
        collections_s.clear()
        cpu, start = time.thread_time(), time.perf_counter()
        work()
        end, cpu = time.perf_counter(), time.thread_time() - cpu
    now, after = resource.getrusage(resource.RUSAGE_THREAD), _device_memory(device)
    calls = _calls(clock.calls)
    longest = max(calls, key=lambda call: call[1], default=("none", 0.0))
    sums = {verb: sum(took for name, took in calls if name.startswith(verb)) for verb in ("dispatch", "combine")}
    last = clock.calls[-1][1] if clock.calls else start
    return Iteration(
        ms=_ms(end - start),
        dispatch_ms=_ms(sums["dispatch"]),
        combine_ms=_ms(sums["combine"]),
        rest_ms=_ms(end - last),
        longest=longest[0],
        longest_ms=_ms(longest[1]),
        cpu_ms=_ms(cpu),
        gc_ms=_ms(sum(collections_s)),
        preemptions=now.ru_nivcsw - before.ru_nivcsw,
        page_faults=now.ru_majflt + now.ru_minflt - before.ru_majflt - before.ru_minflt,
        device_allocations=after[0] - used[0],
        device_growth_bytes=after[1] - used[1],
    )


def outliers(iterations: Sequence[Sequence[Iteration]]) -> list[str]:
    """Describe each prefill that took more than 1.3 times the median, rank by rank, with the rank's medians."""
    times = [max(rank.ms for rank in ranks) for ranks in iterations]
    lines = []
    for index, ranks in enumerate(iterations):
        if times[index] > _OUTLIER * median(times):
            lines.append(
                f"prefill {index + 1} of {len(times)} took {times[index]:,.1f} ms, "
                f"{times[index] / median(times):.2f} times the median; medians in parentheses:"
            )
            lines += [
                f"  rank {rank}: {_describe(one, [each[rank] for each in iterations])}"
                for rank, one in enumerate(ranks)
            ]
    return lines


def _describe(one: Iteration, usual: Sequence[Iteration]) -> str:
    def beside(name: str) -> str:
        return f"{getattr(one, name):,.1f} ({median(getattr(each, name) for each in usual):,.1f})"

    return (
        f"{beside('ms')} ms: dispatch {beside('dispatch_ms')}, combine {beside('combine_ms')}, after the last call "
        f"{beside('rest_ms')}, longest call {beside('longest_ms')}, {one.longest}; processor {beside('cpu_ms')}, "
        f"garbage collection {beside('gc_ms')}; {one.preemptions} preemptions, {one.page_faults} page faults, "
        f"{one.device_allocations} allocations on the device, {one.device_growth_bytes / _MIB:,.1f} MiB"
    )


def _calls(marks: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return each call's name and seconds; calls of a name are one for each layer.

    >>> _calls([("dispatch", 0.5), ("dispatch", 1.5), ("combine", 2.0), ("combine", 2.5)])
    [('dispatch of layer 0', 1.0), ('combine of layer 0', 0.5)]
    """
    found: list[tuple[str, float]] = []
    nums: dict[str, int] = {}
    for (name, start), (_, end) in zip(marks[::2], marks[1::2], strict=True):
        layer = nums[name] = nums.get(name, -1) + 1
        found.append((f"{name} of layer {layer}", end - start))
    return found


@contextmanager
def _collections() -> Iterator[list[float]]:
    """Yield the seconds of each garbage collection inside the block."""
    found: list[float] = []
    began = [0.0]

    def note(phase: str, _: Any) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            found.append(time.perf_counter() - began[0])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def _device_memory(device: str) -> tuple[int, int]:
    """Return how often PyTorch took memory from the device or gave it back, and the bytes in use there."""
    if device == "cpu":
        return 0, 0
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0), total - free


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

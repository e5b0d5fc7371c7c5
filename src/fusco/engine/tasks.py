"""Tasks of a collective, the loop that runs them, and byte streams of segments between ranks."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from fusco.control.counters import Counters
from fusco.control.watchdog import Watchdog
from fusco.core.errors import MismatchError, Stall
from fusco.core.segments import Segments
from fusco.core.timeline import HostTimeline

Awaited = Callable[[], Counters]


class Task(Protocol):
    """Part of a collective that never blocks."""

    def step(self) -> bool:
        """Do at most one slice of work; return ``False`` if nothing can be done now."""

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do."""

    def stall(self) -> Stall:
        """Describe what the task waits for, after ``step`` returned ``False``."""


def run_tasks(
    tasks: Iterable[Task],
    watchdog: Watchdog,
    awaited: Awaited | None = None,
    timeline: HostTimeline | None = None,
    meanwhile: Iterator[bool] | None = None,
) -> None:
    """Advance tasks in turn until all are done; while none can, wait with the watchdog's timeout.

    ``awaited`` returns counters of which one has its value as soon as a task can advance, unless a socket is ready.
    A ``timeline`` gets a span for each step that does something. ``meanwhile`` is that of an ``AllToAllRequest``; with
    one, a rank sleeps without spinning first: its network is busy for long, and others may need its core.
    """
    watchdog.progress()
    pending = [task for task in tasks if not task.is_done]
    if timeline is not None:
        pending = [_RecordedTask(task, timeline) for task in pending]
    while pending:
        moved = [watchdog.poll(), *(task.step() for task in pending)]
        pending = [task for task in pending if not task.is_done]
        if any(moved):
            watchdog.progress()
        elif pending and not (meanwhile and next(meanwhile)):
            counters, may_spin = awaited() if awaited else None, meanwhile is None
            watchdog.pause(functools.partial(_stall_of, pending), counters, is_any=True, may_spin=may_spin)


class _RecordedTask:
    """A task with a span for each step that does something."""

    def __init__(self, task: Task, timeline: HostTimeline) -> None:
        self._task, self._timeline = task, timeline
        self._track = re.sub(r"\B([A-Z])", r" \1", type(task).__name__).lower()
        self.stall = task.stall

    def step(self) -> bool:
        begin = time.perf_counter()
        has_moved = self._task.step()
        if has_moved:
            self._timeline.add(self._track, "slice", begin, time.perf_counter())
        return has_moved

    @property
    def is_done(self) -> bool:
        return self._task.is_done


def _stall_of(tasks: list[Task]) -> Stall:
    stalls = [task.stall() for task in tasks]
    return Stall(
        phase=" + ".join(dict.fromkeys(stall.phase for stall in stalls)),
        on_ranks=tuple(dict.fromkeys(rank for stall in stalls for rank in stall.on_ranks)),
        expected="; ".join(stall.expected for stall in stalls),
        seen="; ".join(stall.seen for stall in stalls),
    )


# Returns the tasks that send segments to some ranks and receive segments from some.
MakeTasks = Callable[[Mapping[int, Segments], Mapping[int, Segments]], list[Task]]


def in_turn(rank: int, partners: Mapping[int, Segments]) -> list[tuple[int, Segments]]:
    """Sort partners, the next rank first, so that receivers take turns.

    >>> nothing = Segments(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    >>> [peer for peer, _ in in_turn(1, {0: nothing, 1: nothing, 2: nothing})]
    [1, 2, 0]
    """
    return sorted(partners.items(), key=lambda entry: (entry[0] < rank, entry[0]))


def run_stream(
    name: str,
    send: Mapping[int, Segments],
    receive: Mapping[int, Segments],
    make_tasks: MakeTasks,
    run: Callable[[Sequence[Task]], None],
) -> None:
    """Send segments to one rank, or receive from one: both sides first exchange what they do, and how many bytes.

    ``run`` runs tasks, ``name`` is for the ``MismatchError`` that both raise if both send, both receive, or the numbers
    differ.
    """
    ((peer, segments),) = (*send.items(), *receive.items())
    num_bytes, device = segments.total_bytes, segments.base.device
    # A receiver's number is inverted, and so negative.
    ours, theirs = _int64_segment(num_bytes if send else ~num_bytes, device), _int64_segment(0, device)
    run(make_tasks({peer: ours}, {peer: theirs}))
    of_peer = int(theirs.base[0])
    if (of_peer >= 0) is bool(send):
        raise MismatchError(f"{name}: that rank calls {'gather_send' if send else 'scatter_recv'}, too")
    if max(of_peer, ~of_peer) != num_bytes:
        raise MismatchError(
            f"{name}: this rank has {num_bytes} bytes of segments, that rank has {max(of_peer, ~of_peer)} bytes"
        )
    run(make_tasks(send, receive))


def _int64_segment(value: int, device: torch.device) -> Segments:
    first, size = torch.tensor([0], device="cpu"), torch.tensor([8], device="cpu")
    return Segments(torch.tensor([value], device=device), first, size)

"""Tasks of a collective, and the loop that runs them."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fusco.control.counters import Counters
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
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
    A ``timeline`` gets a span for each step that does something. ``meanwhile`` is that of an ``AllToAllRequest``.
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
            watchdog.pause(functools.partial(_stall_of, pending), awaited() if awaited else None, is_any=True)


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

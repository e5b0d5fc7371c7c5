"""Tasks of a collective, and the loop that runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Protocol

from fusco.control.counters import Counters
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall


class Task(Protocol):
    """Part of a collective that never blocks."""

    def step(self) -> bool:
        """Do at most one slice of work; return ``False`` if nothing can be done now."""

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do."""

    def stall(self) -> Stall:
        """Describe what the task waits for, after ``step`` returned ``False``."""


def run_tasks(tasks: Iterable[Task], watchdog: Watchdog, awaited: Callable[[], Counters] | None = None) -> None:
    """Advance tasks in turn until all are done; while none can, wait with the watchdog's timeout.

    ``awaited`` returns counters of which one has its value as soon as a task can advance, unless a socket is ready.
    """
    watchdog.progress()
    pending = [task for task in tasks if not task.is_done]
    while pending:
        moved = [watchdog.poll(), *(task.step() for task in pending)]
        pending = [task for task in pending if not task.is_done]
        if any(moved):
            watchdog.progress()
        elif pending:
            watchdog.pause(functools.partial(_stall_of, pending), awaited() if awaited else None, is_any=True)


def _stall_of(tasks: list[Task]) -> Stall:
    stalls = [task.stall() for task in tasks]
    return Stall(
        phase=" + ".join(dict.fromkeys(stall.phase for stall in stalls)),
        on_ranks=tuple(dict.fromkeys(rank for stall in stalls for rank in stall.on_ranks)),
        expected="; ".join(stall.expected for stall in stalls),
        seen="; ".join(stall.seen for stall in stalls),
    )

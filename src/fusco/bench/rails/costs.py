"""Cost of control operations (FuseLink, Table 3) and of giving a rail back and taking it again (Figure 10)."""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from fusco.bench.rails import roles
from fusco.bench.rails.crew import START_S, Crew
from fusco.bench.rails.record import CaseResult, percentile_ms, scaled
from fusco.rails import POLICIES, Endpoint, Rail
from fusco.rails.binding import functions
from fusco.rails.board import BORROWED, COMPLETED, POSTED, Board
from fusco.testbed import Testbed

_REPEATS, _CALLS = 7, 5000
_VICTIM_BYTES, _PERIOD_S = 8_000_000, 0.1
_SAMPLE_S = 0.0002


def measure_costs(_bed: Testbed, _policies: list[str], _seconds: float) -> Iterator[CaseResult]:
    """Measure control operations of a worker on a host of 4 rails and 4 workers, one call each, less an empty one."""
    rails = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(4)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as ending:
        board = Path(folder) / "board"
        workers = [Endpoint(worker=i, rails=rails, board=board, is_polled=True) for i in range(4)]
        for worker in workers:
            ending.enter_context(worker)
        engine, scheduler = functions(), workers[0].scheduler()

        def choose() -> None:
            engine["scheduler_completed"](scheduler, engine["scheduler_next"](scheduler), 0)

        empty = _microseconds(lambda: engine["fileno"](workers[0].handle))
        query = _microseconds(lambda: engine["scheduler_idle"](scheduler)) - empty
        chosen = _microseconds(choose) - 2 * empty
        for _ in range(workers[0].limits.direct_first):  # so each further choice borrows a rail
            engine["scheduler_next"](scheduler)
        borrowed = _microseconds(choose) - 2 * empty
    for case, cost in (
        ("query the load of 4 rails", query),
        ("choose a rail, count the chunk and its completion", chosen),
        ("borrow an idle rail and give it back", borrowed),
    ):
        yield CaseResult(case, "fuselink", {"us": max(0.0, cost)})


def measure_change(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure how long an owner shares its rail after it begins to send, and how soon it is borrowed again."""
    for name in policies:
        if POLICIES[name].rule != "fuselink":
            continue
        with Crew(bed, POLICIES[name], num_rails=2) as crew:
            senders, receivers = crew.hire_pairs(2)
            for receiver in receivers:
                receiver.begin(roles.sink)
            begin = time.monotonic() + START_S
            arrivals = [0.3 + i * _PERIOD_S for i in range(max(1, int((seconds - 0.5) / _PERIOD_S)))]
            senders[0].begin(roles.flow, begin, seconds)
            senders[1].begin(roles.stream, begin, arrivals, [scaled(_VICTIM_BYTES, bed)] * len(arrivals))
            changes = _watch(crew.board(0), begin + seconds)
            for each in (*senders, *receivers):
                each.result()
        results = {
            "last chunk P50 ms": percentile_ms([each.stop_s for each in changes], 50),
            "last chunk P99 ms": percentile_ms([each.stop_s for each in changes], 99),
            "drained P50 ms": percentile_ms([each.drained_s for each in changes], 50),
            "borrowed again P50 ms": percentile_ms([each.again_s for each in changes if each.again_s] or [0.0], 50),
        }
        yield CaseResult("8 MB of the owner every 100 ms", name, results)


@dataclass
class _Change:
    """A message of an owner, in seconds.

    From its first chunk to the last chunk that another worker posts on the rail, and to when none of those is left or
    the message ends; from its end to the next chunk of another worker.
    """

    stop_s: float = 0.0
    drained_s: float = 0.0
    again_s: float = 0.0


def _watch(path: Path, end: float) -> list[_Change]:
    """Watch worker 1 use its rail, which worker 0 borrows, until ``end``."""
    changes: list[_Change] = []
    with closing(Board(path)) as board:
        rows = {each.worker: each.row for each in board.workers()}
        was_active, since, finished = False, 0.0, 0.0
        seen = board.cell(rows[0], 1)[POSTED]
        while (now := time.monotonic()) < end:
            owner, other = board.cell(rows[1], 1), board.cell(rows[0], 1)
            is_active, has_posted = owner[POSTED] != owner[COMPLETED], other[POSTED] != seen
            if is_active and not was_active:
                since = now
                changes.append(_Change())
            if is_active and has_posted:
                changes[-1].stop_s = now - since
            if is_active and not changes[-1].drained_s and not other[BORROWED]:
                changes[-1].drained_s = now - since
            if was_active and not is_active:
                finished = now
                changes[-1].drained_s = changes[-1].drained_s or now - since
            if changes and not is_active and has_posted and not changes[-1].again_s:
                changes[-1].again_s = now - finished
            was_active, seen = is_active, other[POSTED]
            time.sleep(_SAMPLE_S)
    return changes or [_Change()]


def _microseconds(operation: Callable[[], object]) -> float:
    """Return the microseconds of a call, the least of several means."""
    return 1e6 * min(timeit.repeat(operation, number=_CALLS, repeat=_REPEATS)) / _CALLS

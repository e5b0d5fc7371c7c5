"""Rails that go down and up under load, and workers that are killed; every byte is compared."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

from fusco.bench.rails import roles
from fusco.bench.rails.crew import START_S, VARIANTS, Crew
from fusco.bench.rails.record import CaseResult, line_rate
from fusco.rails.board import TX_BYTES, Board
from fusco.testbed import Testbed

_PERIOD_S = 0.5  # between changes
_PHASE_S, _SETTLE_S = 2.0, 1.0  # of one rail and of all rails at the end, and the time that traffic has to follow
_MB = 1_000_000


def measure_flapping(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure traffic while rails fail, with all but one down, and with all up again."""
    for name in policies:
        yield CaseResult("rails go down and up", name, flap(bed, name, seconds))


def measure_killing(bed: Testbed, policies: list[str], _seconds: float) -> Iterator[CaseResult]:
    """Measure when the rail of an owner that was killed is used by others."""
    for name in policies:
        if name != "direct":
            yield CaseResult("owner of a rail killed", name, {"ms until its rail is used": 1e3 * kill(bed, name)})


def flap(bed: Testbed, policy: str, seconds: float) -> dict[str, float]:
    """Take a random rail of a random host down or up every 0.5 s; at least one rail works."""
    num_rails, rng = bed.layout.num_rails, random.Random(0)  # noqa: S311  no secret
    down: dict[int, int] = {}  # rail to host
    with Crew(bed, VARIANTS[policy]) as crew:
        (sender,), (receiver,) = crew.hire_pairs(1)
        receiver.begin(roles.checked_sink)
        begin = time.monotonic() + START_S
        sender.begin(roles.checked_flow, begin, seconds + 2 * _PHASE_S)
        try:
            changes = max(1, int(seconds / _PERIOD_S))
            for i in range(changes):
                time.sleep(max(0.0, begin + i * _PERIOD_S - time.monotonic()))
                rail = rng.randrange(num_rails)
                if rail in down:
                    bed.set_link(down.pop(rail), rail, up=True)
                elif len(down) < num_rails - 1:
                    down[rail] = rng.randrange(2)
                    bed.set_link(down[rail], rail, up=False)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            one = time.monotonic()
            for rail in set(range(num_rails)) - {num_rails - 1}:
                if rail not in down:
                    down[rail] = 0
                    bed.set_link(0, rail, up=False)
            if (host := down.pop(num_rails - 1, None)) is not None:
                bed.set_link(host, num_rails - 1, up=True)
            time.sleep(_PHASE_S)
        finally:
            every = time.monotonic()
            for rail, host in down.items():
                bed.set_link(host, rail, up=True)
        num_sent, deliveries = sender.result(), receiver.result()
    times = [at for at, _ in deliveries]
    return {
        "messages right": float(len(deliveries)) if len(deliveries) == num_sent else -1.0,
        "GB/s": sum(size for at, size in deliveries if at < one) / (one - begin) / 1e9,
        "longest pause ms": 1e3 * max((b - a for a, b in pairwise(times)), default=0.0),
        "of 1 rail, the others down": _speed(deliveries, one + _SETTLE_S, one + _PHASE_S) / line_rate(bed),
        "of all rails, up again": _speed(deliveries, every + _SETTLE_S, every + _PHASE_S)
        / (1 if policy == "direct" else num_rails)
        / line_rate(bed),
    }


def kill(bed: Testbed, policy: str) -> float:
    """Return the seconds from the death of a rail's owner, which was sending, to 1 MB of another worker on its rail."""
    with Crew(bed, VARIANTS[policy], num_rails=2) as crew:
        senders, receivers = crew.hire_pairs(2)
        for receiver, sender in zip(receivers, senders, strict=True):
            receiver.begin(roles.sink)
            sender.begin(roles.flow, time.monotonic() + START_S, 3.0)
        time.sleep(START_S + 0.7)
        with closing(Board(crew.board(0))) as board:
            row = next(each.row for each in board.workers() if each.worker == 0)
            before = board.cell(row, 1)[TX_BYTES]
            begin = time.monotonic()
            senders[1].process.kill()
            while board.cell(row, 1)[TX_BYTES] < before + _MB:
                if time.monotonic() > begin + 3.0:
                    raise TimeoutError("the rail of a killed worker was not used within 3 s")
                time.sleep(0.001)
            return time.monotonic() - begin


def _speed(deliveries: list[tuple[float, int]], begin: float, end: float) -> float:
    """Return the GB/s of what was delivered in an interval, between its first and last delivery."""
    inside = [(at, size) for at, size in deliveries if begin <= at <= end]
    if len(inside) < 2:
        return 0.0
    return sum(size for _, size in inside[1:]) / (inside[-1][0] - inside[0][0]) / 1e9

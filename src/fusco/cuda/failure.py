"""What a wait on the device was for, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusco.core.errors import Stall
from fusco.cuda.kernels.comm import Failure


@dataclass(frozen=True)
class Phase:
    """A kind of wait, by its index in ``Phase`` of comm.cuh; for a peer, unless it is known beforehand what is seen."""

    name: str
    expected: str
    seen: str = ""


PHASES = (
    Phase("exchanging routing on the device", "its routing of epoch"),
    Phase("reuse of the pool", "its release of rows of epoch"),
    Phase("pulling rows", "a chunk of its rows of epoch"),
    Phase("reuse of partial sums", "its release of sums of epoch"),
    Phase("adding partial sums", "its partial sum of epoch"),
    Phase("leaving", "its release of rows in place of epoch"),
    Phase(
        "blocks of the own grid meeting",
        "all blocks of a kernel on the own multiprocessors at once, which are",
        "fewer, as other kernels occupy these",
    ),
)


def own_backlog(expected: str) -> Stall:
    """The words for a wait that needs no peer, but all that is queued before it on the stream."""
    seen = "work queued before it on the stream, whoever queued it"
    return Stall("waiting for the own device", (), expected, seen, is_for_own_device=True)


def stall_of(failure: Failure, node_ranks: Sequence[int]) -> Stall:
    """The words for a wait that ran out, on a device whose node has these ranks."""
    phase = PHASES[failure.phase]
    on_ranks = () if phase.seen else (node_ranks[failure.peer],)
    return Stall(phase.name, on_ranks, f"{phase.expected} {failure.expected}", phase.seen or f"{failure.seen}")

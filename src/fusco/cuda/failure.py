"""Descriptions of device-side waits that timed out or were aborted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusco.core.errors import Stall
from fusco.cuda.kernels.comm import Failure


@dataclass(frozen=True)
class Phase:
    """Description of a wait, at its index in ``Phase`` of comm.cuh. ``seen`` is set for a wait without a peer."""

    name: str
    expected: str
    seen: str = ""


PHASES = (
    Phase("exchanging routing on the device", "its routing of epoch"),
    Phase("reuse of memory for rows", "its release of rows of epoch"),
    Phase("receiving rows", "its row of epoch"),
    Phase("reuse of partial sums", "its release of sums of epoch"),
    Phase("adding partial sums", "its partial sum of epoch"),
    Phase(
        "grid barrier",
        "all blocks of a kernel resident on this device at once, which are",
        "fewer, as other kernels occupy its SMs",
    ),
    Phase("the network", "all messages of epoch", "an abort of NCCL"),
    Phase("carrying rows for each other within the node", "its node barrier"),
    Phase("exchanging rows of each expert", "its counts of epoch"),
    Phase("copying experts", "its message of number"),
    Phase("exchanging rows", "its chunk of number"),
)


def own_backlog(expected: str) -> Stall:
    """Return the stall of a wait that needs no peer, only the work queued before it on the stream."""
    seen = "work queued before it on the stream, by fusco or others"
    return Stall("waiting for the local device", (), expected, seen, is_for_local_device=True)


def stall_of(failure: Failure, node_ranks: Sequence[int]) -> Stall:
    """Return the stall of a device-side wait that failed; ``node_ranks`` are the ranks of its node."""
    phase = PHASES[failure.phase]
    on_ranks = () if phase.seen else (node_ranks[failure.peer],)
    return Stall(phase.name, on_ranks, f"{phase.expected} {failure.expected}", phase.seen or f"{failure.seen}")

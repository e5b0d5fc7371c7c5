"""Functions on ranks that go on without those that fail: every result is compared with the specification."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from fault_jobs import Fault, _held_in_the_end
from members import Members
from rank_setup import Setup

import fusco
from attack.rounds import work


@dataclass(kw_only=True)
class Served:
    """What a rank has been through.

    Attributes:
        failures: for each failure, when it was raised, the ranks that it named, when ``shrink`` returned, what it
            returned, and when the next round was right.
        ranks: members in the end.
        lost: experts that are lost in the end.
        excluded: the text of ``ExcludedError``, if it was raised.
        still_held: resources after closing.
    """

    failures: list[dict] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    excluded: str = ""
    still_held: list[str] = field(default_factory=list)


def serve(
    group: dist.ProcessGroup,
    setup: Setup,
    num_left: int,
    num_rounds: int,
    signs: Path,
    *name: int | str,
    fault: Fault | None = None,
    do: Callable[..., object] = work,
) -> Served:
    """Do rounds until ``num_left`` ranks are left and have done ``num_rounds``; shrink after every failure.

    The folder ``signs`` has a file for each rank that has done the first round.
    """
    served, num_ranks, comm = Served(), dist.get_world_size(group), setup.open(group)
    members, turn, shrinks = Members(comm, num_ranks), 0, False
    do(members, setup, *name, "first", 0)
    (signs / f"rank {comm.rank} works").touch()
    if fault:
        fault.plant(comm.rank)
    try:
        while len(comm.ranks) > num_left or turn < num_rounds:
            try:
                if shrinks:
                    gone = comm.shrink()
                    served.failures[-1] |= {"shrunk_at": time.monotonic(), "gone": gone}
                    shrinks, turn = False, 0
                do(members, setup, *name, str(comm.ranks), turn)
                if served.failures:
                    served.failures[-1].setdefault("right_at", time.monotonic())
                turn += 1
            except fusco.ExcludedError:
                raise
            except fusco.PeerFailureError as error:
                served.failures.append({"raised_at": time.monotonic(), "peers": error.peers, "text": str(error)})
                shrinks = True
        served.ranks, served.lost = comm.ranks, comm.lost_experts
    except fusco.ExcludedError as error:
        served.excluded = str(error)
    with contextlib.suppress(fusco.PeerFailureError):  # a rank that dies at the end has closed, or is waited for
        comm.close()
    del comm, members
    served.still_held = [*_held_in_the_end(), *(t.name for t in threading.enumerate() if t.name.startswith("fusco"))]
    return served


def leave_on_purpose(group: dist.ProcessGroup, setup: Setup, leaving: tuple[int, ...], *name: int | str) -> Served:
    """Work, let ranks leave, and work on."""
    served, comm = Served(), setup.open(group)
    members = Members(comm, dist.get_world_size(group))
    work(members, setup, *name, 0)
    gone = comm.shrink(leaving)
    assert gone == leaving
    if comm.rank not in leaving:
        for turn in range(4):
            work(members, setup, *name, "after", turn)
        served.ranks, served.lost = comm.ranks, comm.lost_experts
        comm.close()
    assert comm.is_broken
    del comm, members
    served.still_held = _held_in_the_end()
    return served


def wait_until_all_work(signs: Path, num_ranks: int, limit_s: float = 60.0) -> None:
    """Wait, in the process that started the ranks, until each has done a round."""
    deadline = time.monotonic() + limit_s
    while sum(1 for _ in signs.glob("* works")) < num_ranks:
        assert time.monotonic() < deadline, f"after {limit_s} s only {sorted(signs.iterdir())}"
        time.sleep(0.005)

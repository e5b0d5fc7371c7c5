"""Functions on ranks that go on without those that fail: every result is compared with the specification."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_jobs import Fault, held, held_in_the_end
from members import Members
from rank_setup import Setup

import fusco
from attack.on_ranks import Holdings
from attack.rounds import work

_NOTICE_S = 2.0  # longer than a notice to a stopped rank is sent


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
    grows: bool = False,
) -> Served:
    """Do rounds until ``num_left`` ranks are left and have done ``num_rounds``; shrink after every failure.

    The folder ``signs`` has a file for each rank that has done the first round. With ``grows`` ranks take in processes
    that join after every round, until all are there, or until there is a file ``enough``.
    """
    served, comm = Served(), setup.open(group)
    members = Members(comm, dist.get_world_size(group))
    work(members, setup, *name, "first", 0)
    (signs / f"rank {comm.rank} works").touch()
    if fault:
        fault.plant(comm.rank)
    serving = _Serving(served, comm, members, setup, name)
    try:
        while len(comm.ranks) > num_left or serving.turn < num_rounds:
            serving.advance()
        while grows and len(comm.ranks) < members.num_ranks and not serving.have_all_seen(signs / "enough"):
            serving.advance(grows=True)
        for _ in range(num_rounds if grows else 0):
            serving.advance()
        served.ranks, served.lost = comm.ranks, comm.lost_experts
    except fusco.ExcludedError as error:
        served.excluded = str(error)
    return _closed(served, comm)


@dataclass
class _Serving:
    """Rounds of one rank, each as its members do them; after a failure the next call is ``shrink``."""

    served: Served
    comm: fusco.Communicator
    members: Members
    setup: Setup
    name: tuple[int | str, ...]
    turn: int = 0
    shrinks: bool = False

    def advance(self, *, grows: bool = False) -> None:
        """Do the next call, which may fail."""
        try:
            if self.shrinks:
                gone = self.comm.shrink()
                self.served.failures[-1] |= {"shrunk_at": time.monotonic(), "gone": gone}
                self.shrinks, self.turn = False, 0
            if grows and self.comm.grow():
                self.turn = 0
            work(self.members, self.setup, *self.name, str(self.comm.ranks), self.turn)
            if self.served.failures:
                self.served.failures[-1].setdefault("right_at", time.monotonic())
            self.turn += 1
        except fusco.ExcludedError:
            raise
        except fusco.PeerFailureError as error:
            self.served.failures.append({"raised_at": time.monotonic(), "peers": error.peers, "text": str(error)})
            self.shrinks = True

    def have_all_seen(self, sign: Path) -> bool:
        """Return whether all ranks have seen a file, the same on all of them."""
        if self.shrinks:
            return False
        seen = torch.full((len(self.comm.ranks), 1), float(sign.exists()))
        try:
            return bool(self.members.all_to_all(None, seen).min())
        except fusco.PeerFailureError as error:
            self.served.failures.append({"raised_at": time.monotonic(), "peers": error.peers, "text": str(error)})
            self.shrinks = True
            return False


@dataclass(frozen=True)
class JoinRequest:
    """What a process that joins knows of the others."""

    port: int
    num_ranks: int
    signs: Path
    fault: Fault | None = None


def join_and_serve(request: JoinRequest, setup: Setup, num_rounds: int, results: Connection, *name: int | str) -> None:
    """Join, do the rounds that the others do, and send a ``Served``."""
    torch.set_num_threads(1)
    if request.fault:
        request.fault.plant(request.fault.victims[0])
    store = dist.TCPStore("127.0.0.1", request.port, is_master=False)
    served = Served()
    (request.signs / "asks").touch()
    comm = fusco.Communicator.join(store, **arguments_of(setup))
    serving = _Serving(served, comm, Members(comm, request.num_ranks), setup, name)
    for _ in range(num_rounds + 1):  # one in the call that has grown
        serving.advance()
    served.ranks, served.lost = comm.ranks, comm.lost_experts
    del serving
    results.send(_closed(served, comm))


def arguments_of(setup: Setup) -> dict[str, Any]:
    """Return the arguments of ``Communicator``, without the group."""
    return {
        "num_experts": setup.num_experts,
        "num_topk": setup.num_topk,
        "max_tokens_per_rank": setup.max_tokens,
        "max_bytes_per_token": setup.max_bytes_per_token,
        "expert_placement": setup.expert_placement,
        "ranks_per_node": setup.ranks_per_node,
        "balancer": setup.balancer,
        "settings": setup.settings,
        "device": setup.device,
    }


def _closed(served: Served, comm: fusco.Communicator) -> Served:
    """Close a communicator and note what is still held."""
    with contextlib.suppress(fusco.PeerFailureError):  # of a rank that has been killed meanwhile
        comm.close()
    served.still_held = still_held()
    return served


def still_held() -> list[str]:
    """Return the resources and threads that a process still holds without a communicator."""
    deadline = time.monotonic() + _NOTICE_S
    while (threads := [each for each in threading.enumerate() if each.name.startswith("fusco")]) and (
        time.monotonic() < deadline
    ):
        threads[0].join(0.05)
    return [*held_in_the_end(), *(thread.name for thread in threads)]


def leave_on_purpose(group: dist.ProcessGroup, setup: Setup, leaving: tuple[int, ...], *name: int | str) -> Served:
    """Work, let ranks leave, and work on."""
    before = held()  # by earlier tests in these processes
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
    served.still_held = held_in_the_end(before)
    return served


def wait_until_all_work(signs: Path, num_ranks: int, limit_s: float = 200.0) -> None:
    """Wait, in the process that started the ranks, until each has done a round."""
    deadline = time.monotonic() + limit_s
    while sum(1 for _ in signs.glob("* works")) < num_ranks:
        assert time.monotonic() < deadline, f"after {limit_s} s only {sorted(signs.iterdir())}"
        time.sleep(0.005)


def leave_and_rejoin(group: dist.ProcessGroup, setup: Setup, num_rounds: int, port: int) -> list[Holdings]:
    """Rank 2 leaves and joins again; return what each rank holds after each time."""
    comm, num_ranks = setup.open(group), dist.get_world_size(group)
    store, holdings = dist.TCPStore("127.0.0.1", port, is_master=False), []
    for turn in range(num_rounds):
        comm.shrink([2])
        if dist.get_rank(group) == 2:
            comm = fusco.Communicator.join(store, **arguments_of(setup))
        else:
            while not comm.grow(store):
                time.sleep(0.01)
        assert comm.ranks == tuple(range(num_ranks))
        work(Members(comm, num_ranks), setup, "again", turn)
        holdings.append(Holdings.now())
    comm.close()
    return holdings

"""Functions on ranks that go on without those that fail: every result is compared with the specification."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
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


def find_lost_experts(group: dist.ProcessGroup) -> bool:
    """Ranks 1 and 2 leave: their experts are lost, their numbers stay."""
    comm = fusco.Communicator(group, num_experts=8, num_topk=2, max_tokens_per_rank=4, max_bytes_per_token=8)
    before = comm.dispatch(torch.ones(1, 1), torch.tensor([[0, 7]]))
    comm.shrink([1, 2])
    if comm.rank in (1, 2):
        return comm.is_broken
    assert (comm.ranks, comm.lost_experts) == ((0, 3), (2, 3, 4, 5))
    assert comm.placement.rank_to_experts == ((0, 1), (), (), (6, 7))
    x, ids = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0, 2], [5, 3], [7, -1]])
    sent = comm.dispatch(x, ids, torch.ones(3, 2))
    assert sent.num_rows_per_expert.tolist() == ([2, 0] if comm.rank == 0 else [0, 2])
    assert comm.combine(sent.rows, sent.handle).tolist() == [[1.0], [0.0], [4.0]]
    assert comm.num_lost_rows == 3
    with pytest.raises(ValueError, match=r"from before its members changed"):
        comm.combine(before.rows, before.handle)
    with pytest.raises(ValueError, match=r"topk_idx\[0, 0\] = 8 is not an expert"):
        comm.dispatch(x[:1], torch.tensor([[8, 0]]))
    with pytest.raises(ValueError, match="rank 1"):
        comm.all_to_all(None, torch.zeros(4, 1), [1] * 4, [1] * 4)
    comm.close()
    return True


def shrink_amid_a_place(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Rank 3 leaves after a ``place`` that reached rank 0 only, as if a failure had interrupted it on the others.

    Return the experts of each rank.
    """
    places = [[0, -1], [1, -1], [2, -1], [3, 0]]
    sizes = {"num_experts": 4, "num_topk": 1, "max_tokens_per_rank": 4, "max_bytes_per_token": 8}
    with fusco.Communicator(group, expert_placement=places, **sizes) as comm:
        if comm.rank == 0:
            reached = comm._owners._validate([[1, -1], [0, 3], [2, -1], [3, -1]])
            comm._owners._take(reached.placement, reached.tables)
            comm._owners.placement_of_all = reached.placement
        comm.shrink([3])
        if comm.rank == 3:
            return []
        sent = comm.dispatch(torch.ones(4, 1), torch.arange(4)[:, None])
        num_experts = sum(each >= 0 for each in comm.placement.rank_to_experts[comm.rank])
        assert sent.num_rows_per_expert.sum().item() == 3 * num_experts
        return [tuple(each) for each in comm.placement.rank_to_experts]


def move_to_new_owners(group: dist.ProcessGroup) -> bool:
    """Rank 3 leaves; its experts get new owners: one from a replica, one from the caller's function."""
    old = [[0, 1, -1], [2, 3, -1], [4, 5, 6], [6, 7, -1]]
    comm = fusco.Communicator(
        group,
        num_experts=8,
        num_topk=1,
        max_tokens_per_rank=8,
        max_bytes_per_token=8,
        expert_placement=old,
        ranks_per_node=2,
    )
    comm.shrink([3])
    if comm.rank == 3:
        return comm.is_broken
    assert comm.lost_experts == (7,)
    weights = [torch.tensor([[float(expert)] * 2 for expert in old[comm.rank]])]
    new = [[0, 1, 6], [2, 3, 7], [4, 5, -1], [-1, -1, -1]]
    comm.move_experts(weights, old, new, load=lambda expert: [torch.full((2,), float(expert))])
    kept = [place for place, expert in enumerate(new[comm.rank]) if expert >= 0]
    assert weights[0][kept, 0].tolist() == [float(new[comm.rank][place]) for place in kept]
    comm.place(new)
    assert comm.lost_experts == ()
    sent = comm.dispatch(torch.arange(8.0).view(8, 1), torch.arange(8).view(8, 1))
    assert sent.num_rows_per_expert.tolist() == [3 * (expert >= 0) for expert in new[comm.rank]]
    rows = torch.cat([weights[0][place, :1].expand(3, 1) for place in kept])
    assert torch.equal(sent.rows, rows)
    with pytest.raises(ValueError, match="expert 6 on rank 3, which is absent"):
        comm.place(old)
    comm.close()
    return True


def refuse_mistakes(group: dist.ProcessGroup) -> bool:
    """Bad arguments of ``shrink`` and ``grow`` raise, and the communicator goes on."""
    comm = fusco.Communicator(group, num_experts=4, num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=8)
    with pytest.raises(ValueError, match="all ranks would leave"):
        comm.shrink([0, 1, 2, 3])
    with pytest.raises(ValueError, match="leaving names rank 4, but there are ranks 0-3"):
        comm.shrink([4])
    with pytest.raises(fusco.MismatchError, match="leaving"):
        comm.shrink([1] if comm.rank == 0 else [2])
    with pytest.raises(ValueError, match="min_ranks"):
        comm.shrink(min_ranks=0)
    assert comm.grow() == ()
    assert comm.dispatch(torch.ones(1, 1), torch.tensor([[comm.rank]])).rows.tolist() == [[1.0]]
    comm.close()
    with pytest.raises(fusco.ClosedError):
        comm.shrink()
    return True


def limit_one_call(group: dist.ProcessGroup, *, by_argument: bool) -> tuple[float, float]:
    """Rank 2 is late for calls with limits of their own: the others raise within the shortest, and name it.

    Returns the seconds that took, and those that the next call waited for rank 2 without a limit of its own.
    """
    comm = fusco.Communicator(
        group,
        num_experts=4,
        num_topk=1,
        max_tokens_per_rank=1,
        max_bytes_per_token=8,
        settings=fusco.Settings(timeout_s=60.0),
    )
    x, ids = torch.ones(1, 1), torch.tensor([[comm.rank]])
    sent = comm.dispatch(x, ids, timeout_s=30.0 + comm.rank)  # ranks may differ
    assert comm.combine(sent.rows, sent.handle, timeout_s=None if comm.rank else 30.0).tolist() == [[1.0]]
    if comm.rank == 2:
        time.sleep(3.0)
    began = time.monotonic()
    with pytest.raises(fusco.PeerFailureError) as caught:
        _dispatch_twice(comm, x, ids, 20.0 if comm.rank else 1.0, by_argument=by_argument)
    elapsed_s = time.monotonic() - began
    assert caught.value.peers == (2,)
    assert comm.shrink() == ()  # it answers, so it was only late
    if comm.rank == 2:
        time.sleep(1.5)
    began = time.monotonic()
    assert comm.dispatch(x, ids).rows.tolist() == [[1.0]]
    waited_s = time.monotonic() - began
    with pytest.raises(ValueError if comm.rank == 1 else fusco.RejectedInputError, match=r"timeout_s.*-1"):
        comm.dispatch(x, ids, timeout_s=-1.0 if comm.rank == 1 else None)
    comm.close()
    return elapsed_s, waited_s


def _dispatch_twice(
    comm: fusco.Communicator, x: torch.Tensor, ids: torch.Tensor, limit_s: float, *, by_argument: bool
) -> None:
    """Dispatch with a limit; the late rank may find all that it needs for the first."""
    for _ in range(2):
        if by_argument:
            comm.dispatch(x, ids, timeout_s=limit_s)
        else:
            with comm.limit(limit_s):
                comm.dispatch(x, ids)


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


def shrink_after_a_grow_that_failed(
    group: dist.ProcessGroup, setup: Setup, fault: Fault
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Return the ranks that ``grow`` has named, those that are gone after ``shrink``, and its seconds."""
    with setup.open(group) as comm:
        comm.grow()
        fault.plant(comm.rank)
        try:
            comm.grow()
        except fusco.PeerFailureError as error:
            raised_at = time.monotonic()
            return error.peers, comm.shrink(), time.monotonic() - raised_at
    raise AssertionError("nothing has failed")


def demand_too_many(group: dist.ProcessGroup) -> bool:
    """Rank 2 dies; the others demand three ranks, then two."""
    settings = fusco.Settings(timeout_s=4.0)
    comm = fusco.Communicator(
        group, num_experts=3, num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=8, settings=settings
    )
    x, ids = torch.ones(1, 1), torch.tensor([[comm.rank]])
    comm.dispatch(x, ids)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fusco.PeerFailureError):
        comm.dispatch(x, ids)
    with pytest.raises(fusco.PeerFailureError, match="only ranks 0-1 are left"):
        comm.shrink(min_ranks=3)
    with pytest.raises(fusco.ClosedError, match="call shrink again"):
        comm.dispatch(x, ids)
    assert comm.shrink(min_ranks=2) == (2,)
    assert comm.dispatch(x, ids).rows.tolist() == [[1.0]]
    comm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "fusco-status-server"]
    return True

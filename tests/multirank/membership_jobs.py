"""Functions on ranks whose members change, each one case: lost experts, new owners, mistakes, limits, too few left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_jobs import Fault
from rank_setup import Setup

import fusco
from fusco.control.joining import JoinStore


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


def make_mistakes_without_rank_0(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of calls in which rank 3 is wrong, once rank 0 has left."""
    sizes, errors = {"num_experts": 4, "num_topk": 1, "max_tokens_per_rank": 4, "max_bytes_per_token": 8}, list[str]()

    def note(call: Callable[..., object], *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except fusco.FuscoError as error:
            errors.append(str(error))

    with fusco.Communicator(group, **sizes) as comm:
        comm.shrink([0])
        if comm.rank == 0:
            return errors
        room, split = fusco.StaticRows(1 if comm.rank == 3 else 4), [0, 0, 2, 1] if comm.rank == 3 else [0, 1, 1, 1]
        note(comm.dispatch, torch.zeros(1, 8, dtype=torch.uint8), torch.tensor([[3]]), static=room)
        note(comm.all_to_all, None, torch.zeros(3, 1), [0, 1, 1, 1], split)
        memory, where = torch.zeros(8, dtype=torch.uint8), torch.tensor([0])
        if comm.rank == 2:
            note(comm.gather_send, fusco.Segments(memory, where, torch.tensor([8])), 3)
        elif comm.rank == 3:
            note(comm.scatter_recv, fusco.Segments(memory, where, torch.tensor([4])), 2)
    return errors


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


def refuse_while_graphs_live(group: dist.ProcessGroup, port: int) -> bool:
    """Nothing changes what a CUDA graph uses that lives; a process that asks to join waits meanwhile."""
    sizes = {"num_experts": 4, "num_topk": 1, "max_tokens_per_rank": 1, "max_bytes_per_token": 8, "ranks_per_node": 2}
    comm = fusco.Communicator(group, **sizes, settings=fusco.Settings(timeout_s=4.0))
    engine, store = comm._engine, dist.TCPStore("127.0.0.1", port, is_master=False)
    engine.num_live_graphs = lambda **_: 2
    refused = r"{0} makes the memory .* 2 CUDA graph\(s\) .* delete them, call {0} again, and capture these calls again"
    with pytest.raises(ValueError, match=refused.format("shrink")):
        comm.shrink([3])
    with pytest.raises(ValueError, match=refused.format("resize")):
        comm.resize(max_tokens_per_rank=2)
    assert comm.grow(store) == ()
    if comm.rank == 3:
        JoinStore(store, "communicator", 4.0).new_number()
    comm.agree("a process has asked")
    with pytest.raises(ValueError, match=refused.format("grow")):
        comm.grow(store)
    del engine.num_live_graphs
    comm.shrink([3])
    if comm.rank == 3:
        return comm.is_broken
    assert comm.grow(store) == ()  # that process has ended
    assert comm.dispatch(torch.ones(1, 1), torch.tensor([[comm.rank]])).rows.tolist() == [[1.0]]
    comm.close()
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

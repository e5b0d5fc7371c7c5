"""Functions on ranks: one rank makes an invalid call, the others do not; then all continue."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mistakes import GOOD, HIDDEN, MISTAKES, Scene, whole
from rank_setup import Setup, check_combine, law_of

import fusco
from comparison import assert_same_bits, world_rows
from fusco.api import create
from fusco.cpu.recycler import OutputRecycler
from generator import any_bits


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call on a rank: type and text of the error (``""`` for none), and the duration."""

    kind: str
    text: str
    seconds: float


def attempt(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test compares it
        return Outcome(type(error).__name__, str(error), time.monotonic() - start)
    return Outcome("", "", time.monotonic() - start)


def make_mistakes(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int, names: list[str]) -> dict[str, Outcome]:
    """Make calls of ``MISTAKES`` on one rank, and the verb of each on all others; after each all collectives work."""
    outcomes = {}
    with setup.open(group) as comm:
        case = setup.case("ragged", 5, comm.topology.world_size, setup.num_topk)
        ids, weights = case.topk_idx(comm.rank), case.topk_weights(comm.rank)
        for name in names:
            mistake, x = MISTAKES[name], torch.ones(case.num_tokens(comm.rank), HIDDEN)
            dispatched = comm.dispatch(x, ids, weights)
            scene = Scene(comm, x, ids, weights, dispatched.handle, dispatched.rows.clone())
            call = mistake.call if comm.rank == mistaken_rank else GOOD[mistake.verb]
            outcomes[name] = attempt(partial(call, scene))
            check_that_it_works(comm, setup)
    return outcomes


def check_that_it_works(comm: fusco.Communicator, setup: Setup) -> None:
    case = setup.case("ragged with holes", 8, comm.topology.world_size)
    law = law_of(comm, case)
    x = [any_bits((case.num_tokens(rank), HIDDEN), torch.float32, "x", rank) for rank in law.ranks]
    dispatched = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank), case.topk_weights(comm.rank))
    assert_same_bits(dispatched.rows, law.rows(comm.rank, x), "dispatch after a mistake")
    y = world_rows(law, HIDDEN, torch.float32, 1)
    check_combine(comm, law, dispatched.handle, case.world_topk_weights(), y)


# Communicators that are closed, foreign, or cannot be created.


def use_foreign_handle(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Use a handle of one communicator with another one of the same kind, on all ranks."""
    with setup.open(group) as comm, setup.open(group) as other:
        case = setup.case("ragged", 5, comm.topology.world_size)
        x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
        dispatched = comm.dispatch(x, case.topk_idx(comm.rank))
        outcomes = [
            attempt(lambda: other.combine(dispatched.rows, dispatched.handle)),
            attempt(lambda: other.dispatch_again(x, dispatched.handle)),
        ]
        check_that_it_works(other, setup)
        return outcomes


def interleave_differently(group: dist.ProcessGroup, setup: Setup) -> Outcome:
    """Call the verbs of two communicators in another order on rank 1."""
    first, second = setup.open(group), setup.open(group)
    case = setup.case("ragged", 5, first.topology.world_size)
    called = second if first.rank == 1 else first
    outcome = attempt(
        lambda: called.dispatch(torch.ones(case.num_tokens(first.rank), HIDDEN), case.topk_idx(first.rank))
    )
    first.abort()
    second.abort()
    return outcome


def use_after_close(group: dist.ProcessGroup, setup: Setup) -> dict[str, Outcome]:
    """Call every collective on a closed communicator."""
    comm = setup.open(group)
    case = setup.case("ragged", 5, comm.topology.world_size)
    x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
    first = comm.dispatch(x, case.topk_idx(comm.rank))
    comm.close()
    other = (comm.rank + 1) % comm.topology.world_size
    return {
        "dispatch": attempt(lambda: comm.dispatch(x, case.topk_idx(comm.rank))),
        "dispatch_again": attempt(lambda: comm.dispatch_again(x, first.handle)),
        "combine": attempt(lambda: comm.combine(first.rows, first.handle)),
        "shuffle": attempt(lambda: comm.shuffle({}, {})),
        "gather_send": attempt(lambda: comm.gather_send(whole(x), other)),
        "scatter_recv": attempt(lambda: comm.scatter_recv(whole(x), other)),
        "close": attempt(comm.close),
    }


def dispatch_without_memory(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int) -> list[Outcome]:
    """Dispatch while one rank has no memory for its output."""
    comm = setup.open(group)
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    has_none = mock.patch.object(OutputRecycler, "_take", side_effect=no_memory)
    with has_none if comm.rank == mistaken_rank else contextlib.nullcontext():
        return _dispatch_twice_and_close(comm, setup)


def dispatch_balanced_badly(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Dispatch with a balancer that does not return groups, on all ranks."""

    def balance_badly(_: fusco.Traffic) -> Any:
        return "static"

    comm = dataclasses.replace(setup, balancer=balance_badly).open(group)
    return _dispatch_twice_and_close(comm, setup)


def dispatch_balanced_differently(group: dist.ProcessGroup, setup: Setup, mistaken_ranks: list[int]) -> Outcome:
    """Dispatch with balancers of one name that return different groups once; afterwards all collectives work."""
    num_calls = itertools.count()

    def balance(traffic: fusco.Traffic) -> fusco.Groups:
        locals_ = range(traffic.topology.ranks_per_node)
        shift = int(next(num_calls) == 0 and dist.get_rank(group) in mistaken_ranks)
        turned = [
            tuple((local + shift * n) % len(locals_) for n in range(traffic.topology.num_nodes)) for local in locals_
        ]
        return fusco.Groups(traffic.topology, tuple(turned))

    with dataclasses.replace(setup, balancer=balance).open(group) as comm:
        case = setup.case("ragged", 5, comm.topology.world_size)
        x, ids = torch.ones(case.num_tokens(comm.rank), HIDDEN), case.topk_idx(comm.rank)
        outcome = attempt(lambda: comm.dispatch(x, ids))
        for _ in range(3):
            check_that_it_works(comm, setup)
    return outcome


def _dispatch_twice_and_close(comm: fusco.Communicator, setup: Setup) -> list[Outcome]:
    """Return the outcomes of a dispatch, of another one after it, and of closing."""
    case = setup.case("ragged", 5, comm.topology.world_size)
    x, ids = torch.ones(case.num_tokens(comm.rank), HIDDEN), case.topk_idx(comm.rank)
    return [attempt(lambda: comm.dispatch(x, ids)), attempt(lambda: comm.dispatch(x, ids)), attempt(comm.close)]


def make_with_another_version(group: dist.ProcessGroup, setup: Setup, version: str) -> Outcome:
    """Create a communicator with another version of fusco on rank 1."""
    with mock.patch.object(create, "__version__", version if dist.get_rank(group) == 1 else create.__version__):
        return attempt(lambda: setup.open(group).close())


def make_differently(
    group: dist.ProcessGroup, setup: Setup, mistaken_rank: int, changes: list[dict[str, Any]]
) -> list[Outcome]:
    """Create communicators with different arguments on one rank; after each all create a valid one."""
    outcomes, is_mistaken = [], mistaken_rank in (-1, dist.get_rank(group))
    for each in changes:
        arguments = {
            "num_experts": setup.num_experts,
            "num_topk": setup.num_topk,
            "max_tokens_per_rank": setup.max_tokens,
            "max_bytes_per_token": setup.max_bytes_per_token,
            "ranks_per_node": setup.ranks_per_node,
            "expert_placement": setup.expert_placement,
            "settings": setup.settings,
            **(each if is_mistaken else {}),
        }
        outcomes.append(attempt(lambda given=arguments: fusco.Communicator(group, **given).close()))
        with setup.open(group) as comm:
            check_that_it_works(comm, setup)
    return outcomes

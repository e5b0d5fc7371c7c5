"""Symmetric memory's rendezvous through a roll call, with a stand-in for PyTorch's that counts as it does."""

from __future__ import annotations

import itertools
import time
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, _resolve_process_group

from fusco.engine.cuda import rendezvous as module
from fusco.engine.cuda.rendezvous import rendezvous
from fusco.errors import PeerFailureError, SharedMemoryError
from rolls import ThreadsRoll, on_ranks

SLACK_S = 5.0


class SymmetricMemory:
    """Stands in for ``_SymmetricMemory``: all-gathers through a store under keys with a counter.

    PyTorch's counter is the process's, so it counts rendezvous with others, too: here every rank has come to another
    number, and waits for keys with its own. The store is called through C++, as PyTorch does.
    """

    def __init__(self, num_gathers: int = 2) -> None:
        self._groups: dict[str, tuple[int, int, PrefixStore]] = {}
        self._num_gathers = num_gathers

    def set_group_info(self, name, rank, world_size, store) -> None:
        self._groups[name] = rank, world_size, PrefixStore("SymmetricMemory", store)

    def rendezvous(self, memory, name):
        rank, world_size, store = self._groups[name]
        own_count = itertools.count(100 * int(memory[0]))
        _resolve_process_group(name)  # PyTorch asks for it, and raises if there is none
        gathered = []
        for number in range(self._num_gathers):
            prefix = f"gather-{next(own_count)}"
            store.set(f"{prefix}/{rank}", f"{number} of {int(memory[0])}")
            keys = [f"{prefix}/{other}" for other in range(world_size)]
            for key in keys:
                store.wait([key])
            gathered.append([bytes(store.get(key)).decode() for key in keys])
        return gathered


@pytest.fixture
def symmetric_memory():
    with mock.patch.object(module, "_SymmetricMemory", SymmetricMemory()) as stand_in:
        yield stand_in


def meet(roll: ThreadsRoll, nodes, name: str = "arena"):
    ranks = next(ranks for ranks in nodes if roll.rank in ranks)
    return rendezvous(torch.tensor([roll.rank]), roll, ranks, name)


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1),), ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5))], ids=str)
def test_ranks_that_count_differently_meet_those_of_their_node(symmetric_memory, nodes):
    met = on_ranks(sum(map(len, nodes)), lambda roll: meet(roll, nodes))
    for ranks in nodes:
        expected = [[f"{number} of {rank}" for rank in ranks] for number in range(2)]
        assert [met[rank] for rank in ranks] == [expected] * len(ranks)


def test_ranks_meet_again_under_another_name(symmetric_memory):
    def meet_twice(roll):
        return [meet(roll, ((0, 1),), name) for name in ("arena", "a buffer")]

    expected = [[f"{number} of {rank}" for rank in range(2)] for number in range(2)]
    assert list(on_ranks(2, meet_twice).values()) == [[expected] * 2] * 2


def test_a_value_may_have_any_bytes():
    value = bytes(range(256))
    stores = {}

    def exchange(roll):
        stores[roll.rank] = store = module._RollCallStore(roll, [0, 1], "arena")
        through_cpp = PrefixStore("any", store)
        through_cpp.set(f"7/{roll.rank}", value[roll.rank :])
        return [through_cpp.get(f"{8 + roll.rank}/{rank}") for rank in range(2)]

    assert list(on_ranks(2, exchange).values()) == [[value, value[1:]]] * 2
    assert [store.failure for store in stores.values()] == [None, None]


def test_a_rank_that_does_not_come_is_named(symmetric_memory):
    began = time.monotonic()
    errors = on_ranks(3, lambda roll: meet(roll, ((0, 1, 2),)), absent=(1,), timeout_s=0.2)
    assert time.monotonic() - began < 0.2 + SLACK_S
    assert {type(error) for error in errors.values()} == {PeerFailureError}
    assert [error.peers for error in errors.values()] == [(1,), (1,)]
    assert all(error.stall.phase == "arena 0" for error in errors.values())


def test_whatever_else_fails_is_told_in_its_own_words(symmetric_memory):
    def fail(memory, name):
        raise RuntimeError("CUDA driver error: peer access is not supported\nException raised from here and there")

    with mock.patch.object(symmetric_memory, "rendezvous", fail):
        error = on_ranks(1, lambda roll: meet(roll, ((0,),)))[0]
    assert type(error) is SharedMemoryError
    assert str(error).startswith(
        "peers' memory could not be mapped on cpu: CUDA driver error: peer access is not supported. Ranks of a node "
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_group_is_gone_afterwards(symmetric_memory, fails):
    known = []

    def end(memory, name):
        known.append(_resolve_process_group(name).size())
        if fails:
            raise RuntimeError("no")

    with mock.patch.object(symmetric_memory, "rendezvous", end):
        for _ in range(2):  # under the same name, which must be free again
            on_ranks(1, lambda roll: meet(roll, ((0,),)))
    assert known == [1, 1]
    with pytest.raises(RuntimeError, match="arena of rank 0"):
        _resolve_process_group("arena of rank 0")

"""Rendezvous of symmetric memory through an all-gather, with a mock of PyTorch that counts in the same way."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, _resolve_process_group

from fusco.core.errors import PeerFailureError, SharedMemoryError
from fusco.cuda.memory import rendezvous as module
from fusco.cuda.memory.rendezvous import rendezvous
from store_gathers import ThreadStoreGather, on_ranks

SLACK_S = 5.0


class Dead(Exception):  # noqa: N818
    """Ends a rank without a message."""


class SymmetricMemory:
    """Mock of ``_SymmetricMemory``: all-gathers through a store under keys with a counter.

    PyTorch's counter is per process, so it counts rendezvous with other ranks, too: here every rank has another
    number, and waits for keys with its own. The store is called through C++, as PyTorch does.
    """

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, int, PrefixStore]] = {}
        self.num_gathers = lambda rank: 2
        self.after_gather = lambda rank, number: None  # the first gather has number 0

    def set_group_info(self, name, rank, world_size, store) -> None:
        self._groups[name] = rank, world_size, PrefixStore("SymmetricMemory", store)

    def rendezvous(self, memory, name):
        rank, world_size, store = self._groups[name]
        caller = int(memory[0])
        own_count = itertools.count(100 * caller)
        _resolve_process_group(name)  # PyTorch asks for it, and raises if there is none
        gathered = []
        self.after_gather(caller, -1)
        for number in range(self.num_gathers(caller)):
            prefix = f"gather-{next(own_count)}"
            store.set(f"{prefix}/{rank}", f"{number} of {caller}")
            keys = [f"{prefix}/{other}" for other in range(world_size)]
            for key in keys:
                store.wait([key])
            gathered.append([bytes(store.get(key)).decode() for key in keys])
            self.after_gather(caller, number)
        return gathered


@pytest.fixture
def symmetric_memory():
    with mock.patch.object(module, "_SymmetricMemory", SymmetricMemory()) as stand_in:
        yield stand_in


def share(store_gather: ThreadStoreGather, nodes, name: str = "arena"):
    ranks = next(ranks for ranks in nodes if store_gather.rank in ranks)
    return rendezvous(torch.tensor([store_gather.rank]), store_gather, ranks, name)


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1),), ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5))], ids=str)
def test_ranks_that_count_differently_share_with_their_node(symmetric_memory, nodes):
    gathered = on_ranks(sum(map(len, nodes)), lambda store_gather: share(store_gather, nodes))
    for ranks in nodes:
        expected = [[f"{number} of {rank}" for rank in ranks] for number in range(2)]
        assert [gathered[rank] for rank in ranks] == [expected] * len(ranks)


def test_ranks_share_again_under_another_name(symmetric_memory):
    def share_twice(store_gather):
        return [share(store_gather, ((0, 1),), name) for name in ("arena", "a buffer")]

    expected = [[f"{number} of {rank}" for rank in range(2)] for number in range(2)]
    assert list(on_ranks(2, share_twice).values()) == [[expected] * 2] * 2


def test_nodes_may_differ_in_how_often_they_gather(symmetric_memory):
    symmetric_memory.num_gathers = lambda rank: 2 if rank < 2 else 5
    gathered = on_ranks(4, lambda store_gather: share(store_gather, ((0, 1), (2, 3))))
    assert [len(gathered[rank]) for rank in range(4)] == [2, 2, 5, 5]


def test_a_value_may_have_any_bytes():
    value = bytes(range(256))
    stores = {}

    def exchange(store_gather):
        stores[store_gather.rank] = store = module._StoreGatherStore(store_gather, [0, 1], "arena")
        through_cpp = PrefixStore("any", store)
        through_cpp.set(f"7/{store_gather.rank}", value[store_gather.rank :])
        return [through_cpp.get(f"{8 + store_gather.rank}/{rank}") for rank in range(2)]

    assert list(on_ranks(2, exchange).values()) == [[value, value[1:]]] * 2
    assert [store.failure for store in stores.values()] == [None, None]


def test_a_missing_rank_is_named(symmetric_memory):
    began = time.monotonic()
    errors = on_ranks(3, lambda store_gather: share(store_gather, ((0, 1, 2),)), absent=(1,), timeout_s=0.2)
    assert time.monotonic() - began < 0.2 + SLACK_S
    assert {type(error) for error in errors.values()} == {PeerFailureError}
    assert [error.peers for error in errors.values()] == [(1,), (1,)]
    assert all(error.stall.phase == "arena 0" for error in errors.values())


def test_other_failures_keep_their_message(symmetric_memory):
    def fail(memory, name):
        raise RuntimeError("CUDA driver error: peer access is not supported\nException raised from here and there")

    with mock.patch.object(symmetric_memory, "rendezvous", fail):
        error = on_ranks(1, lambda store_gather: share(store_gather, ((0,),)))[0]
    assert type(error) is SharedMemoryError
    assert str(error).startswith(
        "rank 0: peers' memory could not be mapped on cpu: CUDA driver error: peer access is not supported. Ranks of a "
    )


@pytest.mark.parametrize("after_gather", [-1, 0, 1], ids=["first", "between", "last"])
@pytest.mark.parametrize("nodes", [((0, 1, 2),), ((0,), (1, 2))], ids=str)
def test_what_one_rank_cannot_map_no_rank_has(symmetric_memory, nodes, after_gather):
    def fail(rank, number):
        if (rank, number) == (1, after_gather):
            raise RuntimeError("CUDA driver error: peer access is not supported")

    symmetric_memory.after_gather = fail
    errors = on_ranks(3, lambda store_gather: share(store_gather, nodes))
    assert {type(error) for error in errors.values()} == {SharedMemoryError}
    assert all(str(error).startswith("rank 1: peers' memory could not be mapped on cpu:") for error in errors.values())


def test_a_rank_that_dies_before_it_sends_its_descriptor_is_named(symmetric_memory, tmp_path):
    def receive_descriptor(rank, number):
        """As PyTorch does after the first gather: waits for a peer at a socket, without a limit of its own."""
        if number == 0:
            if rank == 1:
                raise Dead
            try:
                channel.recv(2)
            except OSError as error:
                raise RuntimeError(f"Failed to receive fd: {error}") from error

    symmetric_memory.after_gather = receive_descriptor
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / f"symm_mem-{os.getpid()}"))
        began = time.monotonic()
        errors = on_ranks(2, lambda store_gather: share(store_gather, ((0, 1),)), timeout_s=1.0)
        assert time.monotonic() - began < 1.5 + SLACK_S
        assert channel.fileno() >= 0
    assert type(errors[0]) is PeerFailureError
    assert errors[0].peers == (1,)


def test_pytorch_still_declares_the_socket_that_gets_a_limit():
    """All builds have this header; only CUDA builds have the name itself (tests/cuda/test_cuda_socket_name.py)."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/symm_mem"
    header = (folder / "CUDASymmetricMemoryUtils.hpp").read_text()
    assert "std::string get_socket_name(int pid);" in header, (
        f"torch {torch.__version__} no longer has IpcChannel::get_socket_name: see fusco.cuda.memory.rendezvous"
    )


def test_no_other_socket_is_given_a_limit(symmetric_memory, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "another"))
        on_ranks(1, lambda store_gather: share(store_gather, ((0,),)))
        assert not any(other.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))


@pytest.mark.parametrize("fails", [False, True])
def test_the_group_is_gone_afterwards(symmetric_memory, fails):
    known = []

    def end(memory, name):
        known.append(_resolve_process_group(name).size())
        if fails:
            raise RuntimeError("no")

    with mock.patch.object(symmetric_memory, "rendezvous", end):
        for _ in range(2):  # under the same name, which must be free again
            on_ranks(1, lambda store_gather: share(store_gather, ((0,),)))
    assert known == [1, 1]
    with pytest.raises(RuntimeError, match="arena of rank 0"):
        _resolve_process_group("arena of rank 0")

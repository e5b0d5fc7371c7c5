"""NCCL messages, with a mock of the C library that records its calls."""
# ruff: noqa: N802  the C library's names

from __future__ import annotations

import ctypes
import threading
import time
from unittest import mock

import pytest
import torch

from fusco.core.errors import PeerFailureError, TransportError
from fusco.cuda.between_nodes import nccl
from fusco.cuda.between_nodes.nccl import Message, NcclTransport
from store_gathers import ThreadStoreGather, on_ranks

DEVICE = torch.device("cuda", 3)
ID = bytes(range(128, 256))[::-1][:64] + bytes(64)[:-1] + b"\x01"  # zeros inside, and something behind them
INTERNAL_ERROR, IN_PROGRESS = 3, 7
COMM = 0x1234
SLACK_S = 5.0  # more than a loaded machine takes for what is to come at once


class Library:
    """Replaces libnccl. ``results`` says what a function gives, instead of success."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.results: dict[str, int] = {}
        self.async_error = 0
        self.version = 22809
        self.devices: list[torch.device] = []  # of the threads that connect
        self.hangs = threading.Event()
        self.hangs.set()  # a launch waits while this is cleared

    def _call(self, *call) -> int:
        self.calls.append(call)
        return self.results.get(call[0], 0)

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def ncclGetUniqueId(self, unique_id):
        ctypes.memmove(unique_id, ID, len(ID))
        return self._call("id")

    def ncclCommInitRank(self, comm, world_size, unique_id, rank):
        comm._obj.value = COMM
        return self._call("connect", world_size, bytes(unique_id), rank)

    def ncclCommInitRankConfig(self, comm, world_size, unique_id, rank, config):
        comm._obj.value = COMM
        config_seen = config._obj
        return self._call(
            "connect", world_size, bytes(unique_id), rank, {n: getattr(config_seen, n) for n, _ in config_seen._fields_}
        )

    def ncclGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def ncclGroupStart(self):
        return self._call("start")

    def ncclGroupEnd(self):
        result = self._call("end")
        self.hangs.wait()
        return self.results.get("after hanging", result)

    def ncclSend(self, address, num_bytes, dtype, peer, comm, stream):
        return self._call("send", address, num_bytes, dtype, peer, comm.value, stream)

    def ncclRecv(self, address, num_bytes, dtype, peer, comm, stream):
        return self._call("receive", address, num_bytes, dtype, peer, comm.value, stream)

    def ncclCommGetAsyncError(self, comm, state):
        state._obj.value = self.async_error
        return self.results.get("state", 0)

    def ncclCommAbort(self, comm):
        self._call("abort", comm.value)
        self.hangs.set()
        return 0

    def ncclCommDestroy(self, comm):
        self._call("destroy", comm.value)
        return 0

    def ncclGetErrorString(self, result):
        return f"error {result}".encode()

    def ncclGetLastError(self, comm):
        return b"socket closed \n"


@pytest.fixture
def library():
    stand_in = Library()
    with (
        mock.patch.object(nccl, "_library", return_value=stand_in),
        mock.patch.object(torch.cuda, "set_device", stand_in.devices.append),
    ):
        yield stand_in


def connect(store_gather: ThreadStoreGather) -> NcclTransport:
    return NcclTransport(store_gather, DEVICE, store_gather.wait_until)


@pytest.fixture
def transport(library):
    made = on_ranks(1, connect)[0]
    library.calls.clear()
    return made


def test_rank_0s_id_reaches_all_ranks_whole(library):
    made = on_ranks(3, connect)
    assert all(isinstance(transport, NcclTransport) for transport in made.values())
    assert library.names.count("id") == 1
    connects = sorted(call for call in library.calls if call[0] == "connect")
    assert connects == [("connect", 3, ID, rank) for rank in range(3)]
    assert library.devices == [DEVICE] * 3


def test_channels_are_all_that_nccl_is_config_seen(library):
    on_ranks(1, lambda store_gather: NcclTransport(store_gather, DEVICE, store_gather.wait_until, channels_per_peer=4))
    (*_, config_seen) = library.calls[-1]
    # As NCCL's header has it for this version.
    assert (config_seen.pop("size"), config_seen.pop("magic"), config_seen.pop("version")) == (80, 0xCAFEBEEF, 22800)
    assert nccl._Config.nChannelsPerNetPeer.offset == 72
    assert config_seen.pop("nChannelsPerNetPeer") == 4
    assert set(config_seen.values()) == {None, -(2**31)}


def test_an_nccl_that_cannot_be_config_seen_goes_without(library):
    library.version = 22702
    on_ranks(1, lambda store_gather: NcclTransport(store_gather, DEVICE, store_gather.wait_until, channels_per_peer=4))
    assert library.calls[-1] == ("connect", 1, ID, 0)


@pytest.mark.parametrize(("function", "what"), [("id", "making an id"), ("connect", "connecting")])
def test_a_failure_while_connecting_says_in_what(library, function, what):
    library.results[function] = INTERNAL_ERROR
    error = on_ranks(1, connect)[0]
    assert type(error) is TransportError
    assert str(error) == f"NCCL failed in {what}: error 3 socket closed"


def test_a_rank_that_does_not_answer_the_roll_is_named(library):
    errors = on_ranks(3, connect, absent=(1,), timeout_s=0.2)
    assert {type(error) for error in errors.values()} == {PeerFailureError}
    assert [error.peers for error in errors.values()] == [(1,), (1,)]
    assert "connect" not in library.names


def test_a_rank_that_does_not_connect_is_not_waited_for_beyond_the_limit(library):
    may_connect, connect_late = threading.Event(), library.ncclCommInitRank
    library.ncclCommInitRank = lambda *arguments: may_connect.wait() and connect_late(*arguments)
    began = time.monotonic()
    error = on_ranks(
        2,
        lambda store_gather: connect(store_gather) if store_gather.rank == 0 else store_gather.all_gather("nccl", ""),
        timeout_s=0.2,
    )[0]
    assert 0.2 <= time.monotonic() - began < 0.2 + SLACK_S
    may_connect.set()
    assert type(error) is PeerFailureError
    assert (error.peers, error.stall.phase) == ((1,), "connecting over NCCL")
    while "abort" not in library.names:  # what connects late is freed
        assert time.monotonic() - began < SLACK_S, library.names
        time.sleep(0.001)


def test_sends_and_receives_are_one_group_on_the_stream_in_their_order(transport, library):
    sends, receives = [Message(2, 100, 10), Message(1, 200, 20)], [Message(1, 300, 30)]
    transport.exchange(sends, receives, stream=77)
    assert library.calls == [
        ("start",),
        ("send", 100, 10, 0, 2, COMM, 77),
        ("send", 200, 20, 0, 1, COMM, 77),
        ("receive", 300, 30, 0, 1, COMM, 77),
        ("end",),
    ]


def test_nothing_to_say_is_not_launched(transport, library):
    transport.exchange([], [], stream=77)
    assert library.calls == []


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("start", "beginning a group"),
        ("send", "a message of 10 bytes with rank 2"),
        ("receive", "a message of 30 bytes with rank 1"),
        ("end", "launching messages"),
    ],
)
def test_a_failure_says_in_what(transport, library, function, what):
    library.results[function] = INTERNAL_ERROR
    with pytest.raises(TransportError) as caught:
        transport.exchange([Message(2, 100, 10)], [Message(1, 300, 30)], stream=77)
    assert str(caught.value) == f"NCCL failed in {what}: error 3 socket closed"


@pytest.mark.parametrize("function", ["send", "receive"])
def test_no_group_stays_open_behind_a_failure(transport, library, function):
    # Every later call of the thread, PyTorch's among them, would wait for its end.
    library.results[function] = INTERNAL_ERROR
    with pytest.raises(TransportError):
        transport.exchange([Message(2, 100, 10)], [Message(1, 300, 30)], stream=77)
    assert library.names.count("start") == library.names.count("end") == 1
    assert library.names[-1] == "end"


def test_what_is_in_progress_is_no_failure(transport, library):
    library.results = {"start": IN_PROGRESS, "end": IN_PROGRESS}
    library.async_error = IN_PROGRESS
    transport.exchange([Message(2, 100, 10)], [], stream=77)
    assert transport.failure == ""


def test_a_failure_of_the_network_is_config_seen_until_the_end(transport, library):
    assert transport.failure == ""
    library.async_error = INTERNAL_ERROR
    assert transport.failure == "NCCL: error 3 socket closed"
    library.async_error, library.results["state"] = 0, 5
    assert transport.failure == "NCCL: error 5 socket closed"
    transport.abort()
    assert transport.failure == ""


def test_after_abort_nothing_is_launched_and_a_second_one_does_nothing(transport, library):
    transport.abort()
    transport.abort()
    transport.exchange([Message(2, 100, 10)], [], stream=77)
    assert library.calls == [("abort", COMM)]


def test_after_finish_nothing_is_launched_and_nothing_is_left_to_abort(transport, library):
    transport.finish()
    transport.finish()
    transport.abort()
    transport.exchange([Message(2, 100, 10)], [], stream=77)
    assert transport.failure == ""
    assert library.calls == [("destroy", COMM)]


def test_after_abort_nothing_is_left_to_finish(transport, library):
    transport.abort()
    transport.finish()
    assert library.calls == [("abort", COMM)]


def test_abort_ends_a_launch_that_hangs(transport, library):
    library.hangs.clear()
    library.results["after hanging"] = INTERNAL_ERROR  # which is then no news
    raised = []

    def launch():
        try:
            transport.exchange([Message(2, 100, 10)], [], stream=77)
        except TransportError as error:
            raised.append(error)

    launching = threading.Thread(target=launch, daemon=True)
    launching.start()
    while "end" not in library.names:
        time.sleep(0.001)
    aborts = [threading.Thread(target=transport.abort, daemon=True) for _ in range(2)]
    for thread in aborts:
        thread.start()
    for thread in (*aborts, launching):
        thread.join(SLACK_S)
        assert not thread.is_alive()
    assert library.names == ["start", "send", "end", "abort"]
    assert raised == []


@mock.patch.object(nccl, "_LAUNCHING_S", 60.0)
def test_abort_lets_a_launch_finish_that_does_not_hang_and_waits_no_longer(transport, library):
    library.hangs.clear()
    launching = threading.Thread(target=transport.exchange, args=([Message(2, 100, 10)], [], 77), daemon=True)
    launching.start()
    while "end" not in library.names:
        time.sleep(0.001)
    aborting = threading.Thread(target=transport.abort, daemon=True)
    aborting.start()
    time.sleep(0.05)
    assert "abort" not in library.names
    library.hangs.set()
    for thread in (launching, aborting):
        thread.join(SLACK_S)
        assert not thread.is_alive()
    assert library.names[-1] == "abort"


def test_without_the_library_the_error_says_what_is_missing():
    with (
        mock.patch.object(ctypes, "CDLL", side_effect=OSError("libnccl.so.2: cannot open shared object file")),
        pytest.raises(TransportError, match=r"several nodes needs NCCL, which was not found: libnccl\.so\.2: cannot"),
    ):
        nccl._library.__wrapped__()

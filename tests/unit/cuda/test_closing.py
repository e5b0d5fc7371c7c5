"""Closing of a communicator on CUDA: no rank frees what peers need, no error is silent, nothing hangs.

Ranks are threads, a node each, with connections as they are; devices only say whether what was launched is done.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco import Capacity, ExpertPlacement, Launch, Settings, Topology
from fusco.api.communicator import Communicator
from fusco.api.create import CommunicatorParts
from fusco.bench.host.null_device import NullEvent, NullGpu, NullStream
from fusco.control.bootstrap import PeerInfo
from fusco.control.connect import connect
from fusco.control.layout import SegmentSizes
from fusco.control.session import Session
from fusco.core.access import Access
from fusco.core.config import EngineConfig
from fusco.core.errors import ClosedError, PeerFailureError, RowOverflowError, Stall
from fusco.cpu.engine import CpuEngine
from fusco.cpu.layout import CpuLayout
from fusco.cuda.engine import CudaEngine
from store_gathers import on_ranks

TIMEOUT_S, SLACK_S = 2.0, 5.0
LIBRARY = SimpleNamespace(device=torch.device("cpu"), num_sms=4)


class Device(NullGpu):
    """GPU of a rank: says whether what was launched is done, and notes what was done to its NCCL."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = lambda: True
        self.log: list[tuple[str, float]] = []
        self.stream = Stream(self)

    @property
    def deeds(self) -> list[str]:
        return [what for what, _ in self.log]

    def new_event(self):
        return Event(self)

    def new_stream(self, *_):
        return Stream(self)

    def connect(self, *_):
        return Nccl(self.log)


class Event(NullEvent):
    """Event that is reached when its device says so."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def query(self) -> bool:
        return self._device.is_done()


class Stream(NullStream):
    """Stream of a device."""

    def __init__(self, device: Device) -> None:
        self.record_event = lambda: Event(device)


class Nccl:
    """Replaces ``NcclTransport``."""

    failure = ""

    def __init__(self, log) -> None:
        self._log = log

    def finish(self) -> None:
        self._log.append(("finish", time.monotonic()))

    def abort(self) -> None:
        if "finish" not in [what for what, _ in self._log]:
            self._log.append(("abort", time.monotonic()))


def config_for(num_ranks, timeout_s) -> EngineConfig:
    capacity = Capacity(max_tokens_per_rank=4, max_bytes_per_token=8, num_topk=1)
    return EngineConfig(Topology.of_equal_nodes(num_ranks, 1), capacity, Settings(timeout_s=timeout_s))


def open_on(store_gather, timeout_s=TIMEOUT_S, *, is_capturing=False) -> Communicator:
    """The communicator of a rank, which has launched something."""
    num_ranks = store_gather.world_size
    config = config_for(num_ranks, timeout_s)
    placement = ExpertPlacement.contiguous(num_ranks, num_ranks)
    connections = connect(
        store_gather, SegmentSizes.of_control(config.topology), PeerInfo(["here"] * num_ranks, [], "127.0.0.1")
    )
    gpu = Device()
    gpu.is_capturing = lambda: is_capturing
    engine = CudaEngine(connections, config, placement, LIBRARY, gpu)
    with engine._order.on_stream(Launch()):
        pass
    session = Session(store_gather.rank, connections, Access("a communicator"), on_broken=engine.abort)
    return Communicator.of_parts(
        CommunicatorParts(session, engine, validator=mock.Mock(caller_placement=placement, members=()))
    )


def device_of(communicator) -> Device:
    return communicator._engine._gpu


def error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    return None


def test_no_rank_ends_nccl_before_all_devices_are_done():
    def close(store_gather):
        communicator, began = open_on(store_gather, timeout_s=20.0), time.monotonic()
        if store_gather.rank == 1:
            device_of(communicator).is_done = lambda: time.monotonic() > began + 0.5
        communicator.close()
        return device_of(communicator), began

    ended = on_ranks(3, close)
    done_at = ended[1][1] + 0.5
    for device, _ in ended.values():
        assert device.deeds == ["finish"]
        assert device.log[0][1] > done_at


def left_alone(befall, timeout_s=TIMEOUT_S):
    """What ``close`` raises on rank 0, whose device something befalls, when rank 1 has left; and rank 0's device."""

    has_left = threading.Event()

    def close(store_gather):
        communicator = open_on(store_gather, timeout_s)
        if store_gather.rank == 1:
            communicator.abort()
            has_left.set()
            return None
        has_left.wait()
        befall(communicator)
        return error_of(communicator.close), device_of(communicator)

    return on_ranks(2, close)[0]


def nothing(communicator) -> None:
    pass


def test_a_rank_that_has_left_is_no_error_where_everything_is_complete():
    error, device = left_alone(nothing)
    assert error is None
    assert device.deeds == ["abort"]


def end_network(engine) -> None:
    engine._network.nccl_watchdog.stall = Stall("the network", (1,), "slice 3", "nothing")


def time_out(engine) -> None:
    engine._arena.failure.is_set = 1


@pytest.mark.parametrize("befall", [end_network, time_out])
def test_a_rank_that_has_left_is_an_error_where_results_are_undefined(befall):
    def later(communicator):
        # It shows after the barrier in which rank 1 is missing has begun.
        session, engine = communicator._session, communicator._engine
        agree = session.agree
        session.agree = lambda *arguments: (befall(engine), agree(*arguments))[1]

    error, _ = left_alone(later)
    assert type(error) is PeerFailureError
    assert error.has_left


def test_a_rank_that_has_left_is_an_error_where_the_device_does_not_end():
    def hang(communicator):
        device_of(communicator).is_done = lambda: False

    with pytest.warns(UserWarning, match=r"has not completed within 1\.0 s: .* memory is not released"):
        error, _ = left_alone(hang)
    assert type(error) is PeerFailureError


def test_an_overflow_is_told_though_a_rank_has_left():
    def overflow(communicator):
        report = communicator._engine._arena.report
        report.overflow_limit, report.overflow_needed = 8, 9

    error, _ = left_alone(overflow)
    assert type(error) is RowOverflowError


def fail() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("query", [lambda: False, fail], ids=["hangs", "failed"])
def test_a_device_that_does_not_end_keeps_its_memory_and_nothing_else(query):
    def leave(store_gather):
        communicator = open_on(store_gather)
        engine = communicator._engine
        address = engine._watchdog._status_server.address
        device_of(communicator).is_done = query
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            communicator.abort()
        took_s = time.monotonic() - began
        assert engine._arena.memory.numel()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=1.0)
        return took_s, [str(warning.message) for warning in caught], weakref.ref(engine)

    took_s, texts, engine = on_ranks(1, leave)[0]
    gc.collect()
    assert took_s < TIMEOUT_S + SLACK_S
    assert len(texts) == 1
    assert "work that a communicator launched on cpu has not completed within 1.0 s" in texts[0]
    assert engine() is not None


def test_a_device_that_is_done_keeps_nothing():
    def leave(store_gather):
        communicator = open_on(store_gather)
        engine = communicator._engine
        communicator.abort()
        assert not hasattr(engine._arena, "memory")
        return weakref.ref(engine)

    engine = on_ranks(1, leave)[0]
    gc.collect()
    assert engine() is None


def test_a_check_raises_what_is_pending_once():
    def check(store_gather):
        communicator = open_on(store_gather)
        communicator.check()
        report = communicator._engine._arena.report
        report.overflow_limit, report.overflow_needed = 8, 9
        errors = [error_of(communicator.check) for _ in range(2)]
        communicator.abort()
        return [*errors, error_of(communicator.check)]

    overflow, nothing, closed = on_ranks(1, check)[0]
    assert (type(overflow), overflow.num_rows, overflow.num_rows_needed) == (RowOverflowError, 8, 9)
    assert nothing is None
    assert type(closed) is ClosedError


def test_after_a_capture_a_failure_of_another_rank_aborts_the_device_though_no_host_waits():
    are_open = threading.Barrier(2)  # a rank that fails earlier would fail the opening of the other

    def capture(store_gather):
        communicator = open_on(store_gather, is_capturing=True)  # launches something, which is captured
        are_open.wait(TIMEOUT_S)
        arena, deadline = communicator._engine._arena, time.monotonic() + TIMEOUT_S
        if store_gather.rank == 1:
            communicator._session.abandon("failed in a test")
        while not (has_aborted := bool(arena._abort.value)) and time.monotonic() < deadline:
            time.sleep(0.001)
        error = error_of(communicator.check)
        communicator.abort()
        return has_aborted, error

    has_aborted, error = on_ranks(2, capture)[0]
    assert has_aborted
    assert type(error) is PeerFailureError
    assert error.peers == (1,)
    assert "rank 1 failed in a test" in str(error)
    assert not [thread for thread in threading.enumerate() if thread.name == "fusco-peer-watch"]


def test_a_rank_that_disconnects_first_while_all_close_is_no_loss_after_a_capture():
    has_closed = threading.Event()

    def close(store_gather):
        communicator, seen = open_on(store_gather, timeout_s=20.0, is_capturing=True), []
        session, arena = communicator._session, communicator._engine._arena
        agree = session.agree

        def agree_late(fingerprint):
            agree(fingerprint)
            if fingerprint.operation == "settle":
                assert has_closed.wait(SLACK_S)
                time.sleep(0.1)  # several intervals of the thread that looks for closed connections
                seen.append(arena._abort.value)

        if store_gather.rank == 0:
            session.agree = agree_late
        communicator.close()
        has_closed.set()
        return seen, device_of(communicator).deeds

    assert on_ranks(2, close) == {0: ([0], ["finish"]), 1: ([], ["finish"])}


@pytest.mark.parametrize("has_failed", [False, True], ids=["closed", "broken"])
def test_a_broken_communicator_has_not_finished(has_failed):
    def synchronize(store_gather):
        communicator = open_on(store_gather)
        if has_failed:
            communicator._session.abandon("a test")
        else:
            communicator.abort()
        error = error_of(communicator.synchronize)
        communicator.abort()
        return error

    assert type(on_ranks(1, synchronize)[0]) is ClosedError


def test_a_broken_communicator_on_the_cpu_has_not_finished():
    def synchronize(store_gather):
        config = config_for(1, TIMEOUT_S)
        connections = connect(store_gather, CpuLayout.of(config).segment_sizes, PeerInfo(["here"], [], "127.0.0.1"))
        engine = CpuEngine(connections, config)
        session = Session(store_gather.rank, connections, Access("a communicator"), on_broken=engine.abort)
        communicator = Communicator.of_parts(
            CommunicatorParts(
                session, engine, validator=mock.Mock(caller_placement=ExpertPlacement.contiguous(1, 1), members=())
            )
        )
        communicator.synchronize()
        communicator.abort()
        return error_of(communicator.synchronize)

    assert type(on_ranks(1, synchronize)[0]) is ClosedError

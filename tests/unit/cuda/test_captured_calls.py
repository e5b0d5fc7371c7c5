"""Graphs that live, as the driver tells of their end, and what is kept for them as members change."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine_parts import engine_of

from fusco import Topology
from fusco.bench.host.null_device import NullGpu
from fusco.control.machine_calls import libc_address
from fusco.core.errors import TransportError
from fusco.cuda import captured_calls as module
from fusco.cuda.captured_calls import CapturedCalls, LiveGraphs
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.comm import Failure


class Driver(NullGpu):
    """GPU whose graphs end as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.semaphores: list[int] = []
        self.post_after_graph = self.semaphores.append

    def end_one(self) -> None:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(libc_address("sem_post"))(self.semaphores[0])


def captured_by(gpu: Driver, *captures: int) -> LiveGraphs:
    graphs = LiveGraphs(gpu)
    for number in captures:
        with mock.patch.object(module, "capture_number", lambda number=number: number):
            graphs.note()
    return graphs


def test_graphs_are_counted_once_each_until_the_driver_has_deleted_them():
    gpu = Driver()
    graphs = captured_by(gpu, 5, 5, 7, 5)
    assert len(gpu.semaphores) == 2
    assert (graphs.count, captured_by(Driver()).count) == (2, 0)
    gpu.end_one()
    assert graphs.count == 1
    gpu.collect_garbage = gpu.end_one  # the last one was let go of
    assert graphs.count_soon() == graphs.count == 0


def test_a_graph_that_lives_is_waited_for_within_a_limit():
    with mock.patch.object(module, "_DELETION_S", 0.01):
        assert captured_by(Driver(), 5).count_soon() == 1


class Driven:
    """Replaces ``cuda.bindings.driver``; notes what it is asked, with results from a test."""

    CUuserObject_flags = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1)
    CUuserObjectRetain_flags = SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1)

    def __init__(self, *results: int) -> None:
        self.CUstream, self.CUhostFn = (lambda handle: ("stream", handle)), (lambda address: ("function", address))
        names = ("cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject")
        outputs = (("active", 17, "graph", [], 0), ("object",), ())
        for name, result, output in zip(names, results, outputs, strict=True):
            code = mock.MagicMock(__int__=lambda _, result=result: result)
            code.name = f"CUDA_ERROR_{result}"
            setattr(self, name, mock.Mock(return_value=(code, *output)))


def post_with(driver: Driven) -> None:
    with (
        mock.patch.dict("sys.modules", {"cuda.bindings": mock.Mock(driver=driver)}),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock(cuda_stream=5)),
    ):
        Gpu(torch.device("cuda", 0)).post_after_graph(1234)


def test_the_driver_posts_when_the_graph_of_the_capture_ends():
    driver = Driven(0, 0, 0)
    post_with(driver)
    driver.cuStreamGetCaptureInfo.assert_called_once_with(("stream", 5))
    driver.cuUserObjectCreate.assert_called_once_with(1234, ("function", libc_address("sem_post")), 1, 1)
    driver.cuGraphRetainUserObject.assert_called_once_with("graph", "object", 1, 1)


@pytest.mark.parametrize("failing", range(3))
def test_a_capture_whose_end_cannot_be_watched_is_an_error(failing):
    with pytest.raises(TransportError, match="CUDA_ERROR_900"):
        post_with(Driven(*(900 * (number == failing) for number in range(3))))


class Memory:
    """Replaces ``Arena``, of three ranks on a node."""

    node_ranks, rank, has_failed = (0, 1, 2), 2, False

    def __init__(self) -> None:
        self.log: list[object] = []
        self.layout = SimpleNamespace(topology=Topology((0, 0, 0), (1, 4, 6)))
        self.begin_again = self.log.append
        self.abort, self.close = (lambda: self.log.append("abort")), (lambda: self.log.append("close"))


def test_replays_go_on_among_those_that_are_left_and_name_them_as_they_are_numbered_now():
    memory, left = Memory(), Topology((0, 0), (4, 6))
    captured = CapturedCalls(memory, LiveGraphs(Driver()), lambda: None)
    captured.go_on_among(left)
    assert memory.log == [0b001]
    assert captured.stall(left) is None
    memory.has_failed, memory.failure = True, Failure(is_set=1, phase=2, peer=1, expected=3, seen=2)
    stall = captured.stall(left)
    assert (stall.phase, stall.on_ranks) == ("receiving rows", (0,))


def engine_with(graphs: LiveGraphs, network: object = None):
    engine = engine_of(
        arena=Memory(),
        graphs=graphs,
        keeps_captured=False,
        network=network,
        shuffle=SimpleNamespace(pending_error=lambda: None),
        resources=mock.Mock(),
        has_work_ended=lambda: True,
        gpu=NullGpu(),
    )
    engine._resources.close.side_effect = engine._release_memory
    return engine


def test_memory_that_graphs_read_outlives_the_engine_until_they_are_deleted():
    gpu = Driver()
    engine, later = engine_with(captured_by(gpu, 5)), engine_with(LiveGraphs(gpu))
    (kept,) = engine.keep_captured()
    assert (kept.arena, engine.keep_captured()) == (engine._arena, [kept])
    engine.close()
    assert engine._arena.log == []
    later._captured = [kept]
    later.abort()
    assert later._arena.log == engine._arena.log == ["abort"]
    assert later.num_live_graphs() == 1
    gpu.end_one()
    assert later.num_live_graphs() == 0
    assert later.keep_captured() == []
    assert engine._arena.log == ["abort", "close"]
    later.close()
    assert later._arena.log == ["abort", "close"]


@pytest.mark.parametrize(("captures", "network"), [((), None), ((5,), object())], ids=["no graph", "between nodes"])
def test_memory_that_no_graph_can_go_on_with_is_released(captures, network):
    engine = engine_with(captured_by(Driver(), *captures), network)
    assert engine.keep_captured() == []
    engine.close()
    assert engine._arena.log == ["close"]


def test_what_was_kept_for_a_change_that_failed_is_released_by_the_second_close():
    engine = engine_with(captured_by(Driver(), 5))
    engine.keep_captured()
    engine.close()
    engine._resources.close.side_effect = None
    assert engine._arena.log == []
    engine.close()
    assert engine._arena.log == ["close"]

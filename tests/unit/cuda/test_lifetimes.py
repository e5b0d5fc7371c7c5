"""Memory lives as long as any stream reads it, though the caller may let go of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from engine_parts import engine_of
from simulated_device import Machine, SimulatedGpu, Stream

from fusco import ExpertPlacement, Groups, Lanes, Launch, Topology
from fusco.core.current_stream import capture_number
from fusco.core.errors import TransportError
from fusco.core.profile import Call, CallProfile
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.engine import CudaEngine
from fusco.cuda.kernels.plan import PlanShape, PlanTensors
from fusco.cuda.kernels.plan_forwarding import ForwardingTensors
from fusco.cuda.stream_order import StreamOrder
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.engine.base import CombineRequest, RedispatchRequest
from fusco.planner.internode import InternodeTraffic

TOPOLOGY = Topology((0, 0, 1, 1, 2, 2))
NUM_ROWS = tuple(tuple(0 if node == rank // 2 else 2 for node in range(3)) for rank in range(6))
NUM_TOKENS = 3
FIRST_ROW = (0, 3, 6, 8, 10, 12, 14)  # all tokens of this node's ranks, two of each other rank


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def plan_of_rank_0() -> InternodePlan:
    """A plan on the first of three nodes, of which each rank forwards for two others."""
    tables = PlanTensors.of(PlanShape(FIRST_ROW[-1], NUM_TOKENS + 4, 2, 1, torch.float32), torch.device("cpu"))
    tables.memory.zero_()
    lanes = Lanes.of_groups(Groups.of_same_local_rank(TOPOLOGY), NUM_ROWS)
    traffic = InternodeTraffic(0, lanes, NUM_ROWS)
    return InternodePlan(
        rank=0,
        placement=ExpertPlacement.contiguous(6, 6),
        first_row=FIRST_ROW,
        held=(0, *traffic.sources),
        num_slots=4,
        num_topk=2,
        tables=tables,
        traffic=traffic,
        forwarding=ForwardingTensors(ints(ForwardingTensors.num_elements(3, NUM_TOKENS)), 3, NUM_TOKENS),
    )


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with SimulatedGpu(Machine(seed=0), torch.device("cuda", 0)).installed() as gpu:
        yield gpu


class Shuffle:
    """Replaces ``IntranodeShuffle``: nothing moves, and the stream is noted."""

    stream: Stream

    def combine(self, request, _call, stream) -> list[torch.Tensor]:
        self.stream = stream
        return list(map(torch.empty_like, request.rows))

    def redispatch(self, request, _call, stream) -> list[torch.Tensor]:
        self.stream = stream
        return [torch.empty_like(payload) for payload in request.payloads]


def engine_on(gpu: SimulatedGpu) -> CudaEngine:
    """An engine of nothing but an order of streams."""
    return engine_of(order=StreamOrder(gpu, pytest.fail), shuffle=Shuffle())


def combine(engine: CudaEngine, plan: DevicePlan, rows: torch.Tensor, launch: Launch) -> None:
    request = CombineRequest(rows=[rows], plan=plan, topk_weights=plan.weights, handle=1, launch=launch)
    engine.prepare_combine(request, Call(2, CallProfile())).run([])


def dispatch_again(engine: CudaEngine, plan: DevicePlan, rows: torch.Tensor, launch: Launch) -> None:
    request = RedispatchRequest(payloads=[rows], plan=plan, handle=1, launch=launch)
    engine.prepare_redispatch(request, Call(2, CallProfile())).run([])


VERBS = pytest.mark.parametrize("verb", [combine, dispatch_again])


@VERBS
def test_a_plan_lives_until_the_own_stream_has_read_it(gpu: SimulatedGpu, verb):
    engine, plan, rows = engine_on(gpu), plan_of_rank_0(), torch.zeros(4, 2)
    verb(engine, plan, rows, Launch(own_stream=True))
    own = {engine._shuffle.stream.cuda_stream}
    assert own != {gpu.stream.cuda_stream}
    for tensor in (
        rows,
        plan.tables.row_to_slots,
        plan.weights,
        plan.tables.token_to_ranks,
        plan.forwarding.node_to_tokens,
    ):
        assert gpu.reads(tensor) == own


@VERBS
def test_a_plan_lives_until_another_stream_of_the_caller_has_read_it(gpu: SimulatedGpu, verb):
    engine, plan, rows = engine_on(gpu), plan_of_rank_0(), torch.zeros(4, 2)
    with gpu.on(gpu.new_stream()) as other:
        verb(engine, plan, rows, Launch())
    assert gpu.reads(plan.tables.row_to_slots) == {other.cuda_stream}
    assert not gpu.reads(rows)  # the caller can see to that


@VERBS
def test_what_was_copied_from_a_plan_lives_as_long(gpu: SimulatedGpu, verb):
    engine, plan, rows = engine_on(gpu), plan_of_rank_0(), torch.zeros(4, 2)
    copies = plan.slices(1)
    assert len(copies) == 2
    assert plan.own_rows.tensors == ()  # no copy
    verb(engine, plan, rows, Launch(own_stream=True))
    for held in copies:
        assert len(held.tensors) == 3
        for tensor in held.tensors:
            assert gpu.reads(tensor) == {engine._shuffle.stream.cuda_stream}


@VERBS
def test_what_was_copied_on_another_stream_lives_until_the_plans_stream_has_read_it(gpu: SimulatedGpu, verb):
    engine, plan, rows = engine_on(gpu), plan_of_rank_0(), torch.zeros(4, 2)
    plan.stream = gpu.stream.cuda_stream
    with gpu.on(gpu.new_stream()):
        verb(engine, plan, rows, Launch())
        copies = plan.slices(1)  # as that call made them
    verb(engine, plan, rows, Launch())
    for held in copies:
        for tensor in held.tensors:
            assert gpu.reads(tensor) == {gpu.stream.cuda_stream}


@VERBS
def test_weights_by_slot_that_were_requested_live_as_long(gpu: SimulatedGpu, verb):
    engine, plan, rows = engine_on(gpu), plan_of_rank_0(), torch.zeros(4, 2)
    requested = [plan.slot_weights, plan.slot_to_k]
    verb(engine, plan, rows, Launch(own_stream=True))
    for tensor in requested:
        assert gpu.reads(tensor) == {engine._shuffle.stream.cuda_stream}


def made_of(plan: InternodePlan) -> list[torch.Tensor]:
    """Return what is made of a plan when it is asked for: values by slot, and rows of slices."""
    return [plan.slot_weights, plan.slot_to_k, *(held.tensors[0] for held in plan.slices(1))]


def capturing(number: int):
    """Let the current stream be in a capture of this number; 0 for none."""
    return mock.patch.multiple(
        "fusco.cuda.within_node.device_plan", is_capturing=lambda: bool(number), capture_number=lambda: number
    )


def are_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[bool]:
    assert all(map(torch.equal, ours, theirs))
    return [each is other for each, other in zip(ours, theirs, strict=True)]


def test_what_a_graph_makes_of_an_earlier_plan_is_not_kept():
    plan = plan_of_rank_0()
    with capturing(1):
        captured = made_of(plan)
        assert not any(are_same(captured, made_of(plan)))
    with capturing(0):
        later = made_of(plan)
        assert not any(are_same(captured, later))
        assert all(are_same(later, made_of(plan)))
    with capturing(1):
        assert all(are_same(later, made_of(plan)))  # the handle keeps it


def test_what_is_made_of_a_graphs_plan_is_kept_in_the_graph_alone():
    plan = plan_of_rank_0()
    plan.capture = 1
    with capturing(1):
        captured = made_of(plan)
        assert all(are_same(captured, made_of(plan)))
    with capturing(0):
        made_of(plan)
        assert plan.weights is not None
        plan.weights.fill_(5)  # by the next replay
        plan.tables.row_to_slots.fill_(1)
        assert plan.slot_weights.tolist() == [0, 5, 0, 0]
        assert all((held.tensors[0] == 1).all() for held in plan.slices(1))


def test_what_another_graph_makes_of_a_graphs_plan_is_not_kept():
    """A third graph may be replayed without it, and would read what it made of an earlier replay of the first."""
    plan = plan_of_rank_0()
    plan.capture = 1
    with capturing(2):
        of_second = made_of(plan)
    with capturing(3):
        assert not any(are_same(of_second, made_of(plan)))
    with capturing(1):
        of_first = made_of(plan)
        assert not any(are_same(of_second, of_first))
        assert all(are_same(of_first, made_of(plan)))


def test_a_capture_is_told_from_others_by_the_drivers_number():
    """Only the driver is simulated, which needs a GPU."""
    driver = mock.Mock(CUstream=lambda handle: ("stream", handle))
    driver.cuStreamGetCaptureInfo.return_value = (0, "active", 17, "graph", [], [], 0)
    with (
        mock.patch.dict("sys.modules", {"cuda.bindings": mock.Mock(driver=driver)}),
        mock.patch("fusco.core.current_stream.is_capturing", return_value=True),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock(cuda_stream=5)),
    ):
        assert capture_number() == 17
        driver.cuStreamGetCaptureInfo.assert_called_with(("stream", 5))
        refused = mock.MagicMock(__int__=lambda _: 900)
        refused.name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        driver.cuStreamGetCaptureInfo.return_value = (refused, None, None, None, None, None, 0)
        with pytest.raises(TransportError, match="could not be identified: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            capture_number()
    assert capture_number() == 0


def test_weights_that_replace_those_of_the_dispatch_are_read_from_then_on():
    plan, other = plan_of_rank_0(), torch.tensor([[7.0, -7], [8, -8], [9, -9], [10, -10]])
    plan.tables.row_to_slots.fill_(-1)
    plan.tables.row_to_slots[0, 1], plan.tables.row_to_slots[-1, 0] = 2, 0
    before = [plan.slot_weights, *(held.tensors[1] for held in plan.slices(1))]
    plan.replace_weights(other)
    assert plan.slot_weights.tolist() == [7, 0, -9, 0]
    assert (plan.weights[0, 1], plan.weights[-1, 0]) == (-9, 7)
    assert not any(each.any() for each in before)
    assert any((held.tensors[1] == 7).any() for held in plan.slices(1))


def test_a_plan_says_where_the_row_of_each_slot_came_from():
    plan = plan_of_rank_0()
    plan.tables.row_to_slots.fill_(-1)
    last = len(FIRST_ROW) - 2
    plan.tables.row_to_slots[FIRST_ROW[0] + 1, 1], plan.tables.row_to_slots[FIRST_ROW[-1] - 1, 0] = 3, 1
    num_last = FIRST_ROW[-1] - FIRST_ROW[-2]
    assert plan.slot_to_source.tolist() == [[0, 0], [last, num_last - 1], [0, 0], [0, 1]]

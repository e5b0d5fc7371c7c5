"""What a CUDA graph cannot hold is refused before anything is launched, and in a way that all ranks learn of."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusco import Capacity, Communicator, ExpertPlacement, Handle, Segments, StaticRows, Topology
from fusco.api.create import CommunicatorParts
from fusco.api.validation import Validator
from fusco.core.access import Access
from fusco.core.profile import Call, CallProfile
from fusco.engine.base import DispatchOutput, Pending
from fusco.planner.balancer import balance_send_and_receive

PLACEMENT = ExpertPlacement.contiguous(4, 4)
CAPACITY = Capacity(max_tokens_per_rank=8, max_bytes_per_token=64, num_topk=2)
X, IDS, NOTHING = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
SEGMENTS = Segments(torch.zeros(8), NOTHING, NOTHING)

VERBS = {
    "exact dispatch": lambda comm, handle: comm.dispatch(X, IDS),
    "static dispatch": lambda comm, handle: comm.dispatch(X, IDS, static=StaticRows(8)),
    "masked dispatch": lambda comm, handle: comm.dispatch(X, IDS, static=StaticRows(rows_per_expert=4)),
    "dispatch_again": lambda comm, handle: comm.dispatch_again(X, handle),
    "combine": lambda comm, handle: comm.combine(torch.zeros(8, 4), handle),
    "shuffle": lambda comm, handle: comm.shuffle({1: SEGMENTS}, {}),
    "all_to_all": lambda comm, handle: comm.all_to_all(torch.zeros(4, 2), torch.ones(4, 2)),
}
CAPTURABLE = ("static dispatch", "masked dispatch", "dispatch_again", "combine")


class OnCpu(Validator):
    """A validator for CUDA that takes tensors of the CPU."""

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            super()._tensor(name, tensor)


class Scene:
    """A communicator on a device, with an engine that does nothing, and a session that notes what it is told."""

    def __init__(self, topology: Topology) -> None:
        sizes = {"num_tokens": 3, "num_topk": 2, "num_slots": 8, "rows_per_expert": None}
        self.plan = mock.Mock(rank=0, placement=PLACEMENT, weights=None, **sizes)
        self.session = mock.MagicMock(sequence_number=1, has_published=False)
        self.session.access = Access("a communicator")
        self.session.begin.side_effect = lambda _: Call(1, CallProfile())
        self.engine = mock.Mock(topology=topology)
        self.engine.pending_error.return_value = None
        self.engine.prepare_dispatch.return_value = Pending((), lambda _: DispatchOutput(self.plan, [X]))
        self.engine.prepare_redispatch.return_value = Pending((), lambda _: [X])
        self.engine.prepare_combine.return_value = Pending((), lambda _: [X])
        self.engine.prepare_shuffle.return_value = Pending((), lambda _: X)
        self.engine.prepare_all_to_all.side_effect = lambda request, _: Pending((), lambda _: request)
        validator = OnCpu(
            rank=0,
            placement=PLACEMENT,
            balancer=balance_send_and_receive,
            capacity=CAPACITY,
            wire_dtype=None,
            device=torch.device("cuda", 0),
        )
        self.comm = Communicator.of_parts(CommunicatorParts(self.session, self.engine, validator))
        self.handle = Handle(self.plan, None, 1)

    def told(self) -> str:
        """The rejection that all ranks are told."""
        return self.session.agree.call_args.args[0].rejection


@pytest.fixture(autouse=True)
def capture():
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True) as capture:
        yield capture


def refused(num_nodes: int) -> dict[str, str]:
    """What each verb that is refused says, to its caller and to all ranks."""
    found = {}
    for name, verb in VERBS.items():
        scene = Scene(Topology.of_equal_nodes(4, 4 // num_nodes))
        try:
            verb(scene.comm, scene.handle)
        except ValueError as error:
            found[name] = str(error)
        assert scene.told() == found.get(name, "")
    return found


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_verbs_that_only_launch_can_be_captured(num_nodes):
    words = refused(num_nodes)
    assert set(words) == set(VERBS) - set(CAPTURABLE)
    assert "pass static=StaticRows(num_rows)" in words.pop("exact dispatch")
    for verb, why in words.items():
        assert why.startswith(f"{verb} waits on the host, so it cannot be captured in a CUDA graph")


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_outside_a_capture_nothing_is_refused(capture, num_nodes):
    capture.return_value = False
    assert refused(num_nodes) == {}


def test_a_communicator_does_not_grow_in_a_capture():
    scene = Scene(Topology.of_equal_nodes(4, 4))
    scene.comm._grows = True
    x, ids = torch.zeros(9, 4), torch.zeros(9, 2, dtype=torch.int64)
    why = "9 tokens, but the communicator was made for max_tokens_per_rank=8; in a CUDA graph sizes are fixed"
    with pytest.raises(ValueError, match=why):
        scene.comm.dispatch(x, ids, static=StaticRows(8))
    assert why in scene.told()
    scene.comm.dispatch(X, IDS, static=StaticRows(8))
    assert scene.engine.prepare_dispatch.call_count == 1


def test_what_is_no_collective_is_refused_before_it_begins():
    scene = Scene(Topology.of_equal_nodes(4, 4))
    comm = scene.comm
    for name, call in (
        ("gather_send", lambda: comm.gather_send(SEGMENTS, 1)),
        ("scatter_recv", lambda: comm.scatter_recv(SEGMENTS, 1)),
        ("synchronize", comm.synchronize),
    ):
        with pytest.raises(ValueError, match=f"{name} waits on the host, so it cannot be captured in a CUDA graph"):
            call()
    assert scene.engine.method_calls == scene.session.method_calls == []


def test_rows_that_are_no_sequence_are_refused_on_all_ranks(capture):
    capture.return_value = False
    scene = Scene(Topology.of_equal_nodes(4, 4))
    with pytest.raises(TypeError, match="combine_all takes a sequence of tensors, got NoneType"):
        scene.comm.combine_all(None, scene.handle)
    assert "combine_all takes a sequence of tensors, got NoneType" in scene.told()

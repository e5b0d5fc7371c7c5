"""What a CUDA graph cannot hold is refused before anything is launched, and in a way that all ranks learn of."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from fusco import Capacity, Communicator, ExpertPlacement, Handle, Segments, StaticSlots, Topology
from fusco.api.collective import CheckedEngine, DispatchOptions
from fusco.api.validation import Checks
from fusco.planner.balancer import balance_send_and_receive

PLACEMENT = ExpertPlacement.contiguous(4, 4)
CAPACITY = Capacity(max_tokens_per_rank=8, max_bytes_per_token=64, num_topk=2)
X, IDS, NOTHING = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
SEGMENTS = Segments(torch.zeros(8), NOTHING, NOTHING)
STATIC = DispatchOptions(static=StaticSlots(8))

VERBS = {
    "exact dispatch": lambda checked, handle: checked.dispatch([X], IDS, None, DispatchOptions()),
    "static dispatch": lambda checked, handle: checked.dispatch([X], IDS, None, STATIC),
    "dispatch_again": lambda checked, handle: checked.dispatch_along([X], handle),
    "combine": lambda checked, handle: checked.combine(torch.zeros(8, 4), handle),
    "shuffle": lambda checked, handle: checked.shuffle({1: SEGMENTS}, {}),
    "all_to_all": lambda checked, handle: checked.all_to_all(torch.zeros(4, 2), torch.zeros(4, 2), (None, None), None),
    "empty": lambda checked, handle: checked.empty((3, 4), torch.float32),
}
CAPTURABLE = ("static dispatch", "dispatch_again", "combine")


class OnCpu(Checks):
    """Checks for CUDA that take tensors of the CPU."""

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        pass


class Scene:
    """What a communicator is made of on a device, with an engine that notes what it is told."""

    def __init__(self, topology: Topology) -> None:
        self.engine = mock.Mock(topology=topology, num_collectives=1)
        self.engine.collective.side_effect = lambda _: nullcontext()
        self.engine.pending_error.return_value = None
        self.checks = OnCpu(0, PLACEMENT, CAPACITY, None, torch.device("cuda", 0))
        self.checked = CheckedEngine(self.engine, self.checks, balance_send_and_receive)
        plan = mock.Mock(rank=0, placement=PLACEMENT, num_tokens=3, num_topk=2, num_slots=8, weights=None)
        self.handle = Handle(plan, None, 1)

    def told(self) -> str:
        """The rejection that the engine publishes."""
        (call,) = [call for call in self.engine.method_calls if call[0] not in ("collective", "pending_error")]
        return call.args[0].rejection


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
            verb(scene.checked, scene.handle)
        except ValueError as error:
            found[name] = str(error)
        assert scene.told() == found.get(name, "")
    return found


def test_within_a_node_verbs_that_only_launch_can_be_captured():
    words = refused(num_nodes=1)
    assert set(words) == set(VERBS) - set(CAPTURABLE)
    assert "pass static=StaticSlots(num_slots)" in words.pop("exact dispatch")
    for verb, why in words.items():
        assert why.startswith(f"{verb} waits on the host, so it cannot be captured in a CUDA graph")


def test_between_nodes_nothing_can_be_captured():
    words = refused(num_nodes=2)
    assert set(words) == set(VERBS)
    for name in ("exact dispatch", *CAPTURABLE):
        verb = name.rsplit(" ", maxsplit=1)[-1]
        assert words[name].startswith(f"{verb} between nodes cannot be captured in a CUDA graph")
        assert "static=StaticSlots(num_slots)" in words[name]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_outside_a_capture_nothing_is_refused(capture, num_nodes):
    capture.return_value = False
    assert refused(num_nodes) == {}


def test_what_is_no_collective_is_refused_before_it_begins():
    scene = Scene(Topology.of_equal_nodes(4, 4))
    comm = Communicator.__new__(Communicator)
    comm._engine, comm._checks, comm._checked = scene.engine, scene.checks, scene.checked
    for name, call in (
        ("gather_send", lambda: comm.gather_send(SEGMENTS, 1)),
        ("scatter_recv", lambda: comm.scatter_recv(SEGMENTS, 1)),
        ("synchronize", comm.synchronize),
    ):
        with pytest.raises(ValueError, match=f"{name} waits on the host, so it cannot be captured in a CUDA graph"):
            call()
    assert scene.engine.method_calls == []

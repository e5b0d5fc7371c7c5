"""Sections of known length inside a step, forward and backward, with and without checkpointing."""

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fusco.bench.train.rank import ObservingDispatcher
from fusco.core.stopwatch import SectionTimer
from fusco.fsdp.dispatcher import Arrival
from fusco.fsdp.timed_dispatcher import SECTIONS

DISPATCH_S, COMBINE_S, DISPATCH_BACKWARD_S, COMBINE_BACKWARD_S, ELSEWHERE_S = 0.01, 0.02, 0.03, 0.04, 0.1


class Clock:
    """The clock of the host, which only work that takes a given time advances."""

    now_s = 0.0


@pytest.fixture(autouse=True)
def clock():
    Clock.now_s = 0.0
    with mock.patch("time.perf_counter", side_effect=lambda: Clock.now_s):
        yield


class Slow(torch.autograd.Function):
    """Takes a given time, forward and backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.save_for_backward(x)
        ctx.backward_s = backward_s
        Clock.now_s += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        Clock.now_s += ctx.backward_s
        return grad, None, None


class SlowDispatcher:
    """Moves no rows, and takes a given time."""

    def dispatch(self, x, topk_idx, topk_weights, num_experts):
        return Arrival(Slow.apply(x, DISPATCH_S, DISPATCH_BACKWARD_S), torch.tensor([len(x)]), None)

    def combine(self, y, arrival):
        return Slow.apply(y, COMBINE_S, COMBINE_BACKWARD_S)


@pytest.mark.parametrize("recomputes", [False, True])
def test_sections_hold_what_happens_in_them_and_nothing_else(recomputes):
    observer = ObservingDispatcher(SlowDispatcher(), SectionTimer("cpu"), num_layers=1, keeps_routing=True)
    topk_idx = torch.zeros(3, 1, dtype=torch.int64)

    def layer(x):
        x = Slow.apply(x, ELSEWHERE_S, ELSEWHERE_S)
        arrival = observer.dispatch(x, topk_idx, torch.ones(3, 1), 1)
        y = Slow.apply(arrival.rows, ELSEWHERE_S, ELSEWHERE_S)
        return Slow.apply(observer.combine(y, arrival), ELSEWHERE_S, ELSEWHERE_S)

    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        observer.topk_idx.clear()
        (checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)).sum().backward()
        section_to_s = observer.clock.take_s(SECTIONS)
        times = 2 if recomputes else 1
        expected = {
            "dispatch": times * DISPATCH_S,
            "combine": times * COMBINE_S,
            "combine_backward": COMBINE_BACKWARD_S,
            "dispatch_backward": DISPATCH_BACKWARD_S,
        }
        assert list(section_to_s) == list(SECTIONS)
        for section, seconds in expected.items():
            assert section_to_s[section] == pytest.approx(seconds)
        assert len(observer.topk_idx) == 1


def test_without_gradients_only_forward_sections_are_measured():
    observer = ObservingDispatcher(SlowDispatcher(), SectionTimer("cpu"), num_layers=1)
    with torch.no_grad():
        x = torch.randn(3, 4)
        observer.combine(x, observer.dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 1))
    section_to_s = observer.clock.take_s(SECTIONS)
    assert section_to_s["dispatch"] == pytest.approx(DISPATCH_S)
    assert section_to_s["combine_backward"] == section_to_s["dispatch_backward"] == 0
    assert not observer.topk_idx


class DeviceEvent:
    """As ``torch.cuda.Event``, on a device whose clock is ``now_ms``; asking it for anything else fails."""

    now_ms = 0.0
    is_synchronized = False

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = DeviceEvent.now_ms

    def elapsed_time(self, end):
        assert DeviceEvent.is_synchronized
        return end.at_ms - self.at_ms


def test_on_cuda_times_are_those_of_events_and_asked_for_at_the_end_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    timer = SectionTimer("cuda")
    for section, begin_ms, end_ms in (("dispatch", 0, 5), ("combine", 6, 8), ("dispatch", 10, 12)):
        for DeviceEvent.now_ms in (begin_ms, end_ms):
            timer.mark(section)
    monkeypatch.setattr(DeviceEvent, "is_synchronized", True)
    expected = {"dispatch": 0.007, "combine": 0.002, "combine_backward": 0, "dispatch_backward": 0}
    assert timer.take_s(SECTIONS) == pytest.approx(expected)
    assert not any(timer.take_s(SECTIONS).values())

"""The result of one call can be waited for by itself, whatever is launched after it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from engine_parts import engine_of
from simulated_device import Event, Machine, SimulatedGpu, Stream, always

from fusco import Capacity, Communicator, ExpertPlacement, Handle, Launch, Topology
from fusco.api.create import CommunicatorParts
from fusco.bench.host.null_device import NullDeviceValidator
from fusco.core.access import Access
from fusco.core.profile import Call, CallProfile
from fusco.cuda.stream_order import StreamOrder
from fusco.engine.base import DispatchOutput, Pending
from fusco.planner.balancer import balance_send_and_receive

PLACEMENT = ExpertPlacement.contiguous(2, 1)
CAPACITY = Capacity(max_tokens_per_rank=8, max_bytes_per_token=64, num_topk=1)
IDS, WEIGHTS = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
OWN = Launch(own_stream=True)


class Streams(SimulatedGpu):
    """Streams of a GPU, of which the caller has two."""

    def __init__(self, seed: int) -> None:
        super().__init__(Machine(seed), torch.device("cuda", 0))
        self.callers, self.other = self.stream, self.machine.new_stream()

    def launch(self, act) -> None:
        """Run something on the current stream, when its turn comes."""
        self.stream.launch("a kernel of the caller", act)

    def advance(self) -> None:
        """Run all that does not wait."""
        while ready := [stream for stream in self.machine._streams if stream.is_ready()]:
            ready[0].go_on()


class Plan:
    """A plan of as many rows as tokens, which notes the stream that its weights by slot are made on."""

    rank, placement, num_tokens, num_topk, num_slots, rows_per_expert = 0, PLACEMENT, 2, 1, 2, None

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.weights, self.num_rows_per_expert = WEIGHTS, torch.tensor([2, 0])
        self.tensors, self.stream = [self.num_rows_per_expert], 0
        self.weighing: list[Stream] = []

    @property
    def slot_weights(self) -> torch.Tensor:
        self.weighing.append(self._streams.stream)
        return WEIGHTS.view(-1)


class Shuffle:
    """Launches one kernel for each call; those from ``first_blocked`` on do not run before ``is_open``."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._num_calls = streams, 0
        self.first_blocked, self.is_open = 1_000, False

    def prepare_dispatch(self, request, _call, stream) -> Pending:
        plan = Plan(self._streams)
        return Pending((), lambda _: DispatchOutput(plan, [self._add_one(x, stream) for x in request.payloads]))

    def redispatch(self, request, _call, stream) -> list[torch.Tensor]:
        return [self._add_one(x, stream) for x in request.payloads]

    def combine(self, request, _call, stream) -> list[torch.Tensor]:
        return [self._add_one(rows, stream) for rows in request.rows]

    def _add_one(self, rows: torch.Tensor, stream: Stream) -> torch.Tensor:
        out = torch.full_like(rows, float("nan"))
        is_blocked = self._num_calls >= self.first_blocked
        self._num_calls += 1
        stream.launch("a kernel", lambda: out.copy_(rows + 1), (lambda: self.is_open) if is_blocked else always)
        return out


def communicator(streams: Streams) -> tuple[Communicator, Shuffle]:
    session = mock.Mock(sequence_number=1, has_published=False, access=Access("a communicator"))
    session.begin.side_effect = lambda _: Call(1, CallProfile())
    validator = NullDeviceValidator(
        rank=0,
        placement=PLACEMENT,
        balancer=balance_send_and_receive,
        capacity=CAPACITY,
        wire_dtype=None,
        device=torch.device("cuda", 0),
    )
    order, shuffle = StreamOrder(streams, pytest.fail), Shuffle(streams)
    engine = engine_of(order=order, topology=Topology((0,)), shuffle=shuffle)
    engine.pending_error = engine.close = lambda: None
    comm = Communicator.of_parts(CommunicatorParts(session, engine, validator))
    return comm, shuffle


@pytest.fixture
def streams() -> Iterator[Streams]:
    with Streams(seed=0).installed() as streams:
        yield streams


def dispatch(comm: Communicator, x: torch.Tensor, _handle: Handle):
    sent = comm.dispatch(x, IDS, WEIGHTS, with_weights=True, launch=OWN)
    return sent.rows, sent.wait


def dispatch_with_event(comm: Communicator, x: torch.Tensor, _handle: Handle):
    event = Event()
    return comm.dispatch(x, IDS, launch=Launch(own_stream=True, event=event)).rows, event.wait


def dispatch_again(comm: Communicator, x: torch.Tensor, handle: Handle):
    event = Event()
    return comm.dispatch_again(x, handle, launch=Launch(own_stream=True, event=event))[0], event.wait


def combine(comm: Communicator, x: torch.Tensor, handle: Handle):
    event = Event()
    return comm.combine(x, handle, launch=Launch(own_stream=True, event=event)), event.wait


VERBS = pytest.mark.parametrize("verb", [dispatch, dispatch_with_event, dispatch_again, combine])


@VERBS
def test_waiting_for_the_first_call_does_not_wait_for_the_second(streams: Streams, verb):
    comm, shuffle = communicator(streams)
    handle = comm.dispatch(torch.zeros(2, 3), IDS).handle
    shuffle.first_blocked = 2
    (first, wait_for_first), (second, wait_for_second) = (verb(comm, torch.full((2, 3), x), handle) for x in (1.0, 5.0))
    seen = []
    wait_for_first()
    streams.launch(lambda: seen.append(first.tolist()))
    with streams.on(streams.other):
        wait_for_second()
        streams.launch(lambda: seen.append(second.tolist()))
    streams.advance()
    assert seen == [[[2.0] * 3] * 2]
    shuffle.is_open = True
    streams.advance()
    assert seen[1:] == [[[6.0] * 3] * 2]


@pytest.mark.parametrize("seed", range(40))
def test_two_micro_batches_are_right_in_any_order_of_streams(seed):
    with Streams(seed).installed() as streams:
        comm, _ = communicator(streams)
        seen: list[tuple[int, list[list[float]]]] = []
        reading = [streams.callers, streams.other]

        def experts(rows: torch.Tensor) -> torch.Tensor:
            y = torch.full_like(rows, float("nan"))
            streams.launch(lambda: y.copy_(rows * 10))
            return y

        def two_micro_batches(_rank: int) -> None:
            batches = torch.full((2, 3), 1.0), torch.full((2, 3), 5.0)
            sent = [comm.dispatch(x, IDS, launch=OWN) for x in batches]
            events, outs = (Event(), Event()), []
            for of_batch, event in zip(sent, events, strict=True):
                of_batch.wait()
                y = experts(of_batch.rows)
                launch = Launch(own_stream=True, event=event)
                outs.append(comm.combine(y, of_batch.handle, launch=launch))
            for number, (out, event, stream) in enumerate(zip(outs, events, reading, strict=True)):
                with streams.on(stream):
                    event.wait()
                    streams.launch(lambda number=number, out=out: seen.append((number, out.tolist())))

        streams.machine.run(two_micro_batches, 1)
        assert sorted(seen) == [(0, [[21.0] * 3] * 2), (1, [[61.0] * 3] * 2)]


def test_results_live_until_every_stream_that_waited_has_read_them(streams: Streams):
    comm, _ = communicator(streams)
    sent = comm.dispatch([torch.zeros(2, 3), torch.zeros(2)], IDS, WEIGHTS, with_weights=True, launch=OWN)
    with streams.on(streams.other):
        sent.wait()
    assert sent.weights is not None
    for tensor in (*sent.payloads, sent.num_rows_per_expert, sent.weights):
        assert streams.reads(tensor) == {streams.callers.cuda_stream, streams.other.cuda_stream}


def test_weights_of_rows_are_made_by_the_call_so_that_the_callers_stream_does_not_wait(streams: Streams):
    comm, _ = communicator(streams)
    streams.advance()
    sent = comm.dispatch(torch.zeros(2, 3), IDS, WEIGHTS, with_weights=True, launch=OWN)
    plan = sent.handle.plan
    assert isinstance(plan, Plan)
    assert len(plan.weighing) == 1
    assert plan.weighing[0] not in (streams.callers, streams.other)
    assert [what for what, *_ in streams.callers.queue] == ["an event"]  # for which the call waits


def test_on_the_callers_stream_there_is_nothing_to_wait_for_and_an_event_is_recorded_there(streams: Streams):
    comm, shuffle = communicator(streams)
    shuffle.first_blocked, event = 0, Event()
    sent = comm.dispatch(torch.zeros(2, 3), IDS, launch=Launch(event=event))
    num_launched = len(streams.callers.queue)
    assert sent.event is None
    sent.wait()
    assert len(streams.callers.queue) == num_launched
    streams.advance()
    assert not event.query()
    shuffle.is_open = True
    streams.advance()
    assert event.query()


def test_an_event_of_another_device_is_refused_before_anything_is_launched(streams: Streams):
    comm, shuffle = communicator(streams)
    handle = comm.dispatch(torch.zeros(2, 3), IDS).handle
    event = Event()
    event.device = torch.device("cuda", 1)
    launch = Launch(own_stream=True, event=event)
    for call in (
        lambda: comm.dispatch(torch.zeros(2, 3), IDS, launch=launch),
        lambda: comm.dispatch_again(torch.zeros(2, 3), handle, launch=launch),
        lambda: comm.combine(torch.zeros(2, 3), handle, launch=launch),
    ):
        with pytest.raises(ValueError, match="event is of cuda:1, the communicator on cuda:0"):
            call()
    assert shuffle._num_calls == 1


def test_a_launch_is_a_launch(streams: Streams):
    comm, _ = communicator(streams)
    with pytest.raises(TypeError, match="launch must be a Launch, got 8"):
        comm.dispatch(torch.zeros(2, 3), IDS, launch=8)

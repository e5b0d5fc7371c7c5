"""Timelines on a simulated device: beginning and duration of spans, and the trace file."""

import json

import pytest

from fusco.core.timeline import NO_TIMELINE, Span, Timeline, write_chrome_trace


class Device:
    """Streams whose clocks advance with the work launched on them; events read the clocks."""

    def __init__(self):
        self.now_ms = {"main": 0.0, "copies": 0.0}
        self.num_events = 0

    def work(self, stream, duration_ms):
        self.now_ms[stream] += duration_ms

    def event(self):
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.is_reached = device, False

    def record(self, stream=None):
        self.at_ms = self.device.now_ms[stream or "main"]

    def synchronize(self):
        self.is_reached = True

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_spans_count_from_the_origin_in_order_of_beginning():
    device = Device()
    timeline = Timeline(device.event)
    with timeline.span("plan", "before the origin"):
        device.work("main", 1.0)
    timeline.begin()
    device.work("main", 0.25)
    with timeline.span("gather", "slice 0"):
        device.work("main", 2.0)
    device.now_ms["copies"] = device.now_ms["main"] - 1.0  # a stream that started before the other was done
    with timeline.span("network", "slice 0", "copies"):
        device.work("copies", 4.0)
    with timeline.span("gather", "slice 1"):
        device.work("main", 0.5)
    assert timeline.spans() == [
        Span("gather", "slice 0", 250.0, 2000.0),
        Span("network", "slice 0", 1250.0, 4000.0),
        Span("gather", "slice 1", 2250.0, 500.0),
    ]


def test_without_an_origin_times_count_from_the_first_span():
    device = Device()
    device.work("main", 7.0)
    timeline = Timeline(device.event)
    for name in ("first", "second"):
        with timeline.span("plan", name):
            device.work("main", 1.0)
    assert [(span.name, span.begin_us) for span in timeline.spans()] == [("first", 0.0), ("second", 1000.0)]


def test_a_span_that_fails_is_closed_and_the_error_goes_on():
    device = Device()
    timeline = Timeline(device.event)

    def fail():
        with timeline.span("scatter", "slice 3"):
            device.work("main", 3.0)
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fail()
    assert timeline.spans() == [Span("scatter", "slice 3", 0.0, 3000.0)]


def test_where_nothing_is_recorded_nothing_is_made():
    first, second = NO_TIMELINE.span("plan", "a"), NO_TIMELINE.span("network", "b", "copies")
    assert first is second
    with first, second:
        pass  # and it can be entered again and again
    with pytest.raises(ValueError, match="goes on"), first:
        raise ValueError("goes on")


def test_a_trace_has_a_process_for_each_rank_and_a_thread_for_each_track(tmp_path):
    ranks = [
        [Span("plan", "plan", 0.0, 10.0), Span("network", "slice 0", 10.0, 20.12345)],
        [Span("network", "slice 0", 11.0, 20.0), Span("scatter", "slice 0", 31.0, 5.0)],
    ]
    write_chrome_trace(tmp_path / "trace.json", ranks, {"traffic": "uniform"})
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"], event["ts"], event["dur"]) for event in spans] == [
        (0, 0, "plan", 0.0, 10.0),
        (0, 1, "slice 0", 10.0, 20.123),
        (1, 1, "slice 0", 11.0, 20.0),
        (1, 2, "slice 0", 31.0, 5.0),
    ]
    labels = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in labels if event["name"] == "thread_name"}
    assert tracks == {
        (rank, thread): track for rank in (0, 1) for thread, track in enumerate(("plan", "network", "scatter"))
    }
    processes = {event["pid"]: event["args"]["name"] for event in labels if event["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert trace["otherData"] == {"traffic": "uniform"}

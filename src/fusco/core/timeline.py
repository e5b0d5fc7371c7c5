"""Timeline of work on a device or the host: named spans on tracks, written as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fusco.core.files import written_beside

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Span:
    """Work on a device or the host: microseconds from the origin to its beginning, and its duration."""

    track: str
    name: str
    begin_us: float
    duration_us: float


class Timeline:
    """Records spans of one rank at the cost of two events per span, which hardly disturbs the work.

    >>> class Tick:  # fake event: each one recorded is a millisecond later than the previous one
    ...     now = 0
    ...     def record(self, stream=None):
    ...         Tick.now += 1
    ...         self.at = Tick.now
    ...     def synchronize(self): pass
    ...     def elapsed_time(self, end): return end.at - self.at
    >>> timeline = Timeline(Tick)
    >>> timeline.begin()
    >>> with timeline.span("network", "slice 0"):
    ...     pass
    >>> timeline.spans()
    [Span(track='network', name='slice 0', begin_us=1000.0, duration_us=1000.0)]
    """

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        """Make an empty timeline; ``new_event`` makes a timing event, by default a ``torch.cuda.Event``."""
        self._new_event = new_event or _cuda_event
        self._origin: Any = None
        self._marks: list[tuple[str, str, Any, Any]] = []

    def begin(self, stream: Any = None) -> None:
        """Record the origin of all times on a stream, and discard earlier spans.

        Timelines of several ranks have a common origin if their devices passed a barrier on that stream just before.
        """
        self._marks.clear()
        self._origin = self._new_event()
        self._origin.record(stream)

    @contextmanager
    def span(self, track: str, name: str, stream: Any = None) -> Iterator[None]:
        """Time the work that the block launches on ``stream``; the host does not wait.

        Args:
            track: the row on which the span is drawn, such as ``"network"``.
            name: the label of the span.
            stream: the stream on which all of the work is launched; ``None`` means the current one.
        """
        start, end = self._new_event(), self._new_event()
        if self._origin is None:
            self._origin = start
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._marks.append((track, name, start, end))

    def timed(self, track: str, name: str, stream: Any, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function and return its result; ``span`` has the other arguments."""
        with self.span(track, name, stream):
            return function(*args)

    def spans(self) -> list[Span]:
        """Return all spans so far, in order of beginning; waits until the device has reached the last of them."""
        origin, spans = self._origin, []
        for track, name, start, end in self._marks:
            assert origin is not None, "the first span sets the origin"
            end.synchronize()
            spans.append(Span(track, name, origin.elapsed_time(start) * 1e3, start.elapsed_time(end) * 1e3))
        return sorted(spans, key=lambda span: span.begin_us)


@dataclass
class Moment:
    """A time of the host's clock, with the interface of an event."""

    at_s: float = 0.0

    def record(self, _stream: Any = None) -> None:
        """Set the present time."""
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: it has come."""

    def elapsed_time(self, end: Moment) -> float:
        """Return the milliseconds to a later one."""
        return (end.at_s - self.at_s) * 1e3


class HostTimeline(Timeline):
    """Records spans of what a rank's host does."""

    def __init__(self) -> None:
        super().__init__(Moment)

    def add(self, track: str, name: str, begin_s: float, end_s: float) -> None:
        """Add a span between two values of ``time.perf_counter``."""
        self._marks.append((track, name, Moment(begin_s), Moment(end_s)))


class NoTimeline:
    """Timeline that records nothing."""

    _NOTHING = nullcontext()

    def span(self, track: str, name: str, stream: Any = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing."""
        return self._NOTHING

    def timed(self, _track: str, _name: str, _stream: Any, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function and return its result; a third of the time of a span that does nothing."""
        return function(*args)


NO_TIMELINE = NoTimeline()


def write_chrome_trace(
    path: Path, rank_to_spans: Sequence[Sequence[Span]], about: Mapping[str, str] | None = None
) -> None:
    """Write the spans of all ranks in Chrome's trace format: a process for each rank, a thread for each track.

    ``rank_to_spans`` has the ``Timeline.spans`` of each rank; tracks are drawn in order of first appearance. ``about``
    is further information for the reader of the file.

    Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    in_order = [span.track for spans in rank_to_spans for span in spans]
    track_to_thread = {track: thread for thread, track in enumerate(dict.fromkeys(in_order))}
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(rank_to_spans):
        events += _labels(rank, track_to_thread)
        events += [
            {
                "ph": "X",
                "pid": rank,
                "tid": track_to_thread[span.track],
                "cat": span.track,
                "name": span.name,
                "ts": round(span.begin_us, 3),
                "dur": round(span.duration_us, 3),
            }
            for span in spans
        ]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
    with written_beside(path) as beside:
        beside.write_text(json.dumps(content), encoding="utf-8")


def _labels(rank: int, track_to_thread: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the events that name a rank and its tracks, and order them."""
    labels: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for track, thread in track_to_thread.items():
        about = {"ph": "M", "pid": rank, "tid": thread}
        labels.append({**about, "name": "thread_name", "args": {"name": track}})
        labels.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return labels


def _cuda_event() -> Any:
    import torch  # noqa: PLC0415  only this function needs it

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

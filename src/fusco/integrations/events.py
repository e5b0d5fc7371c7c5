"""Events as DeepEP passes them: of the stream that is current when one is captured."""

from __future__ import annotations

import torch


class EventHandle:
    """An event recorded on the current CUDA stream; without CUDA, where calls return when they are done, nothing."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event, or ``None``, which a stream can wait for; in a ``with`` block the stream waits at its end.

    ``extra_tensors`` are kept alive with the event.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event, if there is one."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


def wait_for(*previous_events: EventOverlap | EventHandle | None) -> None:
    """Make the current stream wait for a caller's events."""
    for event in previous_events:
        if event is not None:
            event.current_stream_wait()


def finished(is_asynchronous: bool) -> EventOverlap:
    """Return an event after everything on the current stream; without one unless the caller wants to wait for it."""
    return EventOverlap(EventHandle() if is_asynchronous else None)

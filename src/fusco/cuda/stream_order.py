"""Streams of a communicator: launches in issue order, and a wait with a timeout for all launched work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fusco.core.config import Launch

_POLL_INTERVAL_S = 1e-3


class StreamOrder:
    """Keeps all launches of a communicator in one order, on any streams. The caller orders graph replays."""

    def __init__(self, device: torch.device, on_capture: Callable[[], None]) -> None:
        """``on_capture`` is called in each launch that a graph captures."""
        self._device, self._on_capture = device, on_capture
        self.streams: list[torch.cuda.Stream] = []  # all streams with launches
        self.own = self.new_stream()
        self._done = torch.cuda.Event()
        self.latest: torch.cuda.Stream | None = None  # of the latest call

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Add a stream of the communicator; a lower number is a higher priority."""
        self.streams.append(torch.cuda.Stream(self._device, priority=priority))
        return self.streams[-1]

    @contextmanager
    def on_stream(
        self, launch: Launch, *inputs: torch.Tensor | None, held: Sequence[torch.Tensor] = ()
    ) -> Iterator[torch.cuda.Stream]:
        """Launch on the caller's stream or the communicator's, after all earlier launches.

        Args:
            launch: selects the stream.
            inputs: the caller's tensors, which the caller keeps alive on its own streams.
            held: tensors referenced only by a handle; the caller cannot call ``record_stream`` on them.

        """
        callers = torch.cuda.current_stream(self._device)
        stream = self.own if launch.own_stream else callers
        if stream != callers:
            stream.wait_stream(callers)
            held = [*held, *(tensor for tensor in inputs if tensor is not None)]
        for tensor in held:
            tensor.record_stream(stream)  # the caller may free it before it is read
        if torch.cuda.is_current_stream_capturing():
            self._on_capture()
        elif self.latest not in (None, stream):
            stream.wait_stream(self.latest)
        if stream != self.latest and stream not in self.streams:
            self.streams.append(stream)
        self.latest = stream
        with self.resumed(stream):
            yield stream

    @contextmanager
    def resumed(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Re-enter the stream of ``on_stream``, with nothing launched in between."""
        is_current = stream == torch.cuda.current_stream(self._device)
        if is_current and torch.cuda.current_device() == self._device.index:
            yield
            return
        with torch.cuda.stream(stream):
            yield

    def hand_over(
        self, outputs: Sequence[torch.Tensor], launch: Launch, stream: torch.cuda.Stream
    ) -> torch.cuda.Event | None:
        """Record the end of a call that was launched on ``stream``, and that the caller's stream will use its outputs.

        Returns:
            An event of this call alone; ``None`` on the caller's stream, whose later work comes after the call.

        """
        if launch.event is not None:
            launch.event.record(stream)
        if not launch.own_stream:
            return None
        for output in outputs:
            output.record_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()
        done.record(stream)
        return done

    def wait(self) -> None:
        """Make the current stream wait for all launched work."""
        if self.latest is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.latest)

    def mark(self) -> torch.cuda.Event:
        """Return an event that completes after all work launched so far, including graphs on the current stream."""
        self.wait()
        self._done.record(torch.cuda.current_stream(self._device))
        return self._done


class Drain:
    """All work launched on some streams so far. Kernels of other libraries may be queued ahead of it."""

    def __init__(self, streams: Iterable[torch.cuda.Stream], limit_s: float) -> None:
        """Record an event on each stream. The time limit starts now."""
        self._deadline = time.monotonic() + limit_s
        self._events = []
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)

    def is_complete(self) -> bool:
        """Wait until all of it is complete; return False if the time limit expires first."""
        while not all(event.query() for event in self._events):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

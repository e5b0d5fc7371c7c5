"""The streams of a communicator: launches in issue order, and a wait with a timeout for all launched work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fusco.core.config import Launch

_POLL_INTERVAL_S = 1e-3


class StreamOrder:
    """Keeps all that a communicator launches in one order, on whichever streams; replays of graphs are the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.streams: list[torch.cuda.Stream] = []  # all that are launched on
        self.own = self.new_stream()
        self._done = torch.cuda.Event()
        self.latest: torch.cuda.Stream | None = None  # on which the latest call was launched

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Make a stream on which the communicator launches, too; the lower its number, the higher its priority."""
        self.streams.append(torch.cuda.Stream(self._device, priority=priority))
        return self.streams[-1]

    @contextmanager
    def on_stream(
        self, launch: Launch, *inputs: torch.Tensor | None, held: Sequence[torch.Tensor] = ()
    ) -> Iterator[torch.cuda.Stream]:
        """Launch on the caller's stream or the own one, after everything launched before.

        Args:
            launch: which stream.
            inputs: the caller's tensors, which it looks after on its own streams.
            held: what only a handle holds, so that the caller cannot look after it on any stream.

        """
        callers = torch.cuda.current_stream(self._device)
        stream = self.own if launch.own_stream else callers
        if stream != callers:
            stream.wait_stream(callers)
            held = [*held, *(tensor for tensor in inputs if tensor is not None)]
        for tensor in held:
            tensor.record_stream(stream)  # the caller may let go of it before it is read
        if self.latest not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self.latest)
        if stream != self.latest and stream not in self.streams:
            self.streams.append(stream)
        self.latest = stream
        with self.resumed(stream):
            yield stream

    @contextmanager
    def resumed(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Go on where ``on_stream`` was left, with nothing launched in between."""
        is_current = stream == torch.cuda.current_stream(self._device)
        if is_current and torch.cuda.current_device() == self._device.index:
            yield
            return
        with torch.cuda.stream(stream):
            yield

    def hand_over(self, outputs: Sequence[torch.Tensor], launch: Launch) -> None:
        """What was made on the own stream will be used on the caller's."""
        if launch.own_stream:
            for output in outputs:
                output.record_stream(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Have the current stream wait for everything that was launched."""
        if self.latest is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.latest)

    def mark(self) -> torch.cuda.Event:
        """What is recorded once everything launched so far is done, graphs on the current stream included."""
        self.wait()
        self._done.record(torch.cuda.current_stream(self._device))
        return self._done


class LastWork:
    """All work launched on some streams so far. Kernels of other libraries may be queued ahead of it."""

    def __init__(self, streams: Iterable[torch.cuda.Stream], limit_s: float) -> None:
        """Record an event on each stream. The time limit starts now."""
        self._deadline = time.monotonic() + limit_s
        self._events = []
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)

    def ends(self) -> bool:
        """Wait until all of it is complete; return False if the time limit expires first."""
        while not all(event.query() for event in self._events):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

"""Streams of a communicator: launches in issue order, and a wait with a timeout for all launched work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from fusco.core.config import Launch
from fusco.core.threads import limit_now
from fusco.cuda.gpu import Gpu
from fusco.cuda.within_node.device_plan import SEVERAL_STREAMS, DevicePlan

_POLL_INTERVAL_S = 1e-3
_Result = TypeVar("_Result")


class StreamOrder:
    """Keeps all launches of a communicator in one order, on any streams. The caller orders graph replays."""

    def __init__(self, gpu: Gpu, on_capture: Callable[[], None]) -> None:
        """``on_capture`` is called in each launch that a graph captures."""
        self._gpu, self._device, self._on_capture = gpu, gpu.device, on_capture
        self.streams: list[torch.cuda.Stream] = []  # all streams with launches
        self.own = self.new_stream()
        self._done = gpu.new_event()
        self.latest: torch.cuda.Stream | None = None  # of the latest call
        self._current: torch.cuda.Stream | None = None
        self._current_handle = 0

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Add a stream of the communicator; a lower number is a higher priority."""
        self.streams.append(self._gpu.new_stream(priority))
        return self.streams[-1]

    def current(self) -> torch.cuda.Stream:
        """Return the current stream of the device, the same object as long as it is current."""
        if self._current is None or self._gpu.current_handle(self._device.index) != self._current_handle:
            self._current = self._gpu.current_stream()
            self._current_handle = self._current.cuda_stream
        return self._current

    def enter(
        self, launch: Launch, *inputs: torch.Tensor | None, held: DevicePlan | None = None
    ) -> tuple[torch.cuda.Stream, AbstractContextManager[object] | None]:
        """Return the caller's stream or the communicator's, after all earlier launches, and a context to launch on it.

        The context is for ``inside``, several times, with nothing else launched in between; ``None`` changes nothing.

        Args:
            launch: selects the stream.
            inputs: the caller's tensors, which the caller keeps alive on its own streams.
            held: a plan whose tensors only a handle has, so that the caller cannot call ``record_stream`` on them.
        """
        callers = self.current()
        stream = self.own if launch.own_stream else callers
        if stream is not callers and stream != callers:
            stream.wait_stream(callers)
            for tensor in inputs:
                if tensor is not None:
                    tensor.record_stream(stream)  # the caller may free it before it is read
        if held is not None and held.stream != stream.cuda_stream:
            for tensor in held.tensors:
                tensor.record_stream(stream)
            held.stream = SEVERAL_STREAMS  # what the plan keeps of this call is memory of this stream
        is_captured = self._is_captured()
        if stream is not self.latest and stream != self.latest:
            if self.latest is not None and not is_captured:
                stream.wait_stream(self.latest)
            if stream not in self.streams:
                self.streams.append(stream)
        self.latest = stream
        if stream is callers and self._gpu.current_index() == self._device.index:
            return stream, None
        return stream, self._gpu.on(stream)

    def goes_on(self, stream: torch.cuda.Stream) -> bool:
        """Return whether ``enter`` would have nothing to do for a launch on a stream: it is still the current one."""
        return (
            self.latest is stream
            and self._current is stream
            and self._gpu.current_handle(self._device.index) == self._current_handle
            and self._gpu.current_index() == self._device.index
            and not self._gpu.is_capturing()
        )

    def _is_captured(self) -> bool:
        is_captured = self._gpu.is_capturing()
        if is_captured:
            self._on_capture()
        return is_captured

    @contextmanager
    def on_stream(self, launch: Launch, *inputs: torch.Tensor | None) -> Iterator[torch.cuda.Stream]:
        """Launch as ``enter`` says, inside."""
        stream, context = self.enter(launch, *inputs)
        with context or nullcontext():
            yield stream

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
            output.record_stream(self._gpu.current_stream())
        return stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for all launched work."""
        if self.latest is not None:
            self._gpu.current_stream().wait_stream(self.latest)

    def mark(self) -> torch.cuda.Event:
        """Return an event that completes after all work launched so far, including graphs on the current stream."""
        self.wait()
        self._done.record(self._gpu.current_stream())
        return self._done


def inside(context: AbstractContextManager[object] | None, function: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function in a context of ``StreamOrder.enter`` and return its result."""
    if context is None:
        return function(*args)
    with context:
        return function(*args)


class Drain:
    """All work launched on some streams so far. Kernels of other libraries may be queued ahead of it."""

    def __init__(self, streams: Iterable[torch.cuda.Stream], limit_s: float) -> None:
        """Record an event on each stream. The time limit starts now."""
        self._deadline = time.monotonic() + limit_now(limit_s)
        self._events = [stream.record_event() for stream in streams]

    def is_complete(self) -> bool:
        """Wait until all of it is complete; return False if the time limit expires first."""
        while not all(event.query() for event in self._events):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

"""On which stream a rank's work is launched, and in what order with everything before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fusco.core.config import Launch


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
        """Have the current stream wait for everything that was launched."""
        if self.latest is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.latest)

    def mark(self) -> torch.cuda.Event:
        """What is recorded once everything launched so far is done, graphs on the current stream included."""
        self.wait()
        self._done.record(torch.cuda.current_stream(self._device))
        return self._done

"""On which stream a rank's work is launched, and in what order with everything before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fusco.core.launch import Launch
from fusco.cuda.context import Kernels


class StreamOrder:
    """Keeps all that a communicator launches in one order, on whichever streams; replays of graphs are the caller's."""

    def __init__(self, device: torch.device, kernels: Kernels, streams: list[torch.cuda.Stream]) -> None:
        """Every stream that is launched on joins ``streams``."""
        self._device, self._kernels, self._streams = device, kernels, streams
        self.own = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self.latest: torch.cuda.Stream | None = None  # on which the latest call was launched

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
        if stream != self.latest and stream not in self._streams:
            self._streams.append(stream)
        self.latest = stream
        self._kernels.begin(stream.cuda_stream)
        if stream == callers and torch.cuda.current_device() == self._device.index:
            yield stream
            return
        with torch.cuda.stream(stream):
            yield stream

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

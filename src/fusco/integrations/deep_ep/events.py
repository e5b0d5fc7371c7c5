"""Events as DeepEP passes them, of the stream that is current when one is captured; and waits for each rank."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from fusco.api.communicator import Communicator
from fusco.core.current_stream import is_capturing


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
        self._hook: Callable[[], Any] | None = None
        self._releases_handle = False

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Set what the next wait calls after it, and returns the result of; there can be one."""
        if self._hook is not None:
            raise ValueError("this event has a hook already")
        self._hook = hook_after_wait

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait for the event, if there is one; return what the hook returns, or ``None``.

        ``release_handle`` drops the event, and what is kept alive with it, afterwards.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if release_handle:
            self.event = self.extra_tensors = None
        return None if hook is None else hook()

    wait = current_stream_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Set ``release_handle`` for a ``with`` block; return this object."""
        self._releases_handle = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait(self._releases_handle)


def wait_for(*previous_events: EventOverlap | EventHandle | None) -> None:
    """Make the current stream wait for a caller's events."""
    for event in previous_events:
        if event is not None:
            event.current_stream_wait()


def finished(is_asynchronous: bool) -> EventOverlap:
    """Return an event after everything on the current stream; without one unless the caller wants to wait for it."""
    return EventOverlap(EventHandle() if is_asynchronous else None)


def waits_for_ranks(comm: Communicator, verb: str, num_ranks: int, device: torch.device) -> list[int]:
    """Return how much later than this one each rank has come to a call, in nanoseconds; two collectives.

    Ranks need no common clock: each measures how long it waits for the last of all, and tells that to the others. So
    the costs are right to the time that an agreement takes. A rank has come once its device has done what was launched
    on the current stream: the host waits for it, and cannot in the capture of a graph (``ValueError``).
    """
    if is_capturing():
        raise ValueError(
            f"the waits of a {verb} are measured by the host, which is not in a CUDA graph: give no statistics"
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    begin = perf_counter_ns()
    comm.agree(f"arrival at a {verb}")
    waited = perf_counter_ns() - begin
    costs, numbers = [0] * num_ranks, comm.topology.numbers
    for number, (of_rank,) in zip(numbers, comm.agree(f"waits of a {verb}", [waited]), strict=True):
        costs[number] = max(0, waited - of_rank)
    return costs

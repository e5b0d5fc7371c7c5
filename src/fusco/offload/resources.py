"""Streams, events and relay buffers: what a GPU needs to copy over a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fusco.offload.driver import CudaDriver
from fusco.offload.mover import TO_HOST, PathStreams


class Resources:
    """Streams, events and memory of several contexts, freed together in the reverse order."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver, self._ending = driver, ExitStack()

    def context(self, device: int) -> int:
        """Retain the primary context of a device."""
        context = self._driver.retain(device)
        self._ending.callback(self._driver.release, device)
        return context

    def stream(self, context: int) -> int:
        return self._make(context, self._driver.new_stream, self._driver.free_stream)

    def events(self, context: int, count: int) -> list[int]:
        return [self._make(context, self._driver.new_event, self._driver.free_event) for _ in range(count)]

    def buffer(self, context: int, num_bytes: int) -> int:
        return self._make(context, lambda: self._driver.allocate(num_bytes), self._driver.free)

    def copy_kernel(self, context: int) -> int:
        """Load the kernel that copies chunks."""
        with self._driver.current(context):
            module, kernel = self._driver.load_copy_kernel()
        self._ending.callback(self._driver.free_module, module)
        return kernel

    def close(self) -> None:
        self._ending.close()

    def _make(self, context: int, make: Callable[[], int], free: Callable[[int], None]) -> int:
        with self._driver.current(context):
            made = make()

        def end() -> None:
            with self._driver.current(context):
                free(made)

        self._ending.callback(end)
        return made


def direct_path(resources: Resources, context: int, depth: int) -> PathStreams:
    """Return the path of a GPU's own link, with ``depth`` chunks under way at most."""
    path = PathStreams(num_slots=depth, last_context=context, last_stream=resources.stream(context))
    path.last_events[:depth] = resources.events(context, depth)
    return path


def relayed_path(
    resources: Resources, contexts: Sequence[int], direction: int, depth: int, chunk_bytes: int
) -> PathStreams:
    """Return the path of another GPU's link; ``contexts`` are this GPU's and the relay's."""
    context, relay = contexts
    first, last = (context, relay) if direction == TO_HOST else (relay, context)
    path = PathStreams(
        buffer=resources.buffer(relay, depth * chunk_bytes),
        num_slots=depth,
        first_context=first,
        first_stream=resources.stream(first),
        last_context=last,
        last_stream=resources.stream(last),
    )
    path.first_events[:depth] = resources.events(first, depth)
    path.last_events[:depth] = resources.events(last, depth)
    return path

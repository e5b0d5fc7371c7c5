"""A relay: another GPU of this host whose PCIe link copies may take, with the memory, streams and events there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fusco.core.errors import LaunchError, TransportError
from fusco.offload.driver import CudaDriver
from fusco.offload.mover import FROM_HOST, TO_HOST, Mover, PathStreams
from fusco.offload.settings import GpuLinks, RelayBudget
from fusco.rails.policy import Limits

_DRAIN_S = 10.0  # limit of a wait for chunks under way
_LOOK_S = 0.0005
_DIRECTIONS = (TO_HOST, FROM_HOST)


@dataclass(frozen=True)
class RelayHost:
    """Parts shared by the relays of a GPU: the driver, its context, the links of the host, bounds, and the mover."""

    driver: CudaDriver
    context: int
    links: GpuLinks
    limits: Limits
    budget: RelayBudget
    mover: Mover


class Relay:
    """Memory on one other GPU (``device`` in this process), taken and given back as the budget says."""

    def __init__(self, host: RelayHost, device: int, link: int) -> None:
        self._host, self.device, self.link = host, device, link
        self.held_bytes = 0  # on the GPU now, the CUDA context included
        self.reason = "it was not opened"  # why it is not used; empty if it is
        self._resources: Resources | None = None
        self._is_draining = False  # also after an error: a drained path is given no chunks until it is opened again

    @property
    def is_open(self) -> bool:
        """True if copies may take the link."""
        return self._resources is not None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the relay buffers of both directions."""
        return len(_DIRECTIONS) * self._host.limits.borrowed_per_rail * self._host.limits.chunk_bytes

    def open(self) -> bool:
        """Take memory on the GPU if the budget allows it, and return whether it is used; ``reason`` says why not."""
        if self.is_open:
            return True
        host, resources = self._host, Resources(self._host.driver)
        try:
            free_bytes = host.links.free_bytes(self.link)
            self.reason = host.budget.why_not(free_bytes, self.buffer_bytes)
            if self.reason:
                return False
            paths = self._take(resources)
            self.held_bytes = max(self.buffer_bytes, free_bytes - host.links.free_bytes(self.link))
            self.reason = host.budget.why_not(free_bytes, self.held_bytes)
        except (OSError, LaunchError) as error:  # without NVML what is held there is not known
            self.reason = str(error)
        except BaseException:
            resources.close()
            raise
        if self.reason:
            self.held_bytes = 0
            resources.close()
            return False
        self._resources = resources
        for direction, path in zip(_DIRECTIONS, paths, strict=True):
            host.mover.open_path(2 * self.link + direction, path)
        return True

    def check(self) -> bool:
        """Give everything back if the GPU's memory is low or cannot be read; return whether that was so."""
        if not self.is_open:
            return False
        try:
            free_bytes = self._host.links.free_bytes(self.link)
        except OSError as error:
            self.close(f"its memory was given back, since {error}")
            return True
        if self._host.budget.decide(free_bytes, self.held_bytes) == "keep" and not self._is_draining:
            return False
        self.close(f"its memory was given back when only {free_bytes / (1 << 20):,.0f} MiB were free")
        return True

    def close(self, reason: str) -> None:
        """Drain the link and give everything back; raises ``TransportError`` if it does not drain."""
        if self._resources is None:
            return
        self._is_draining = True
        rails = [2 * self.link + direction for direction in _DIRECTIONS]
        end = time.monotonic() + _DRAIN_S
        while under_way := sum([self._host.mover.drain_path(rail) for rail in rails]):
            if time.monotonic() > end:
                raise TransportError(
                    f"{under_way} chunks on the PCIe link of GPU {self.device} did not end in {_DRAIN_S:g} s"
                )
            time.sleep(_LOOK_S)
        try:
            self._resources.close()
        finally:
            self._resources, self.held_bytes, self.reason, self._is_draining = None, 0, reason, False

    def _take(self, resources: Resources) -> Sequence[PathStreams]:
        """Map the buffers of both directions, once."""
        host = self._host
        relay = resources.context(self.device)
        with host.driver.current(host.context):
            host.driver.enable_access(relay)
        depth, chunk_bytes = host.limits.borrowed_per_rail, host.limits.chunk_bytes
        contexts = (host.context, relay)
        return [relayed_path(resources, contexts, direction, depth, chunk_bytes) for direction in _DIRECTIONS]


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

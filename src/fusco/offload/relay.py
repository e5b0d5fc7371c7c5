"""A relay: another GPU of this host whose PCIe link copies may take, with the memory that they hold there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fusco.core.errors import LaunchError, TransportError
from fusco.offload.driver import CudaDriver
from fusco.offload.links import GpuLinks
from fusco.offload.mover import FROM_HOST, TO_HOST, Mover, PathStreams
from fusco.offload.resources import Resources, relayed_path
from fusco.offload.settings import RelayBudget
from fusco.rails.limits import Limits

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

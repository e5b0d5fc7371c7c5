"""The PCIe links of this host's GPUs, read from NVML: without a context on any of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from fusco.rails.board import NamedRail
from fusco.rails.rail import MAX_RAILS

_GT_PER_S = (0, 2.5, 5, 8, 16, 32, 64)  # of one PCIe lane, by generation


class NvmlError(OSError):
    """NVML is missing or has failed."""


class GpuLinks:
    """The GPUs of this host that NVML knows, in the order of their PCI bus ids: the same in every process."""

    def __init__(self) -> None:
        """Open NVML; raises ``NvmlError``."""
        try:
            import pynvml  # noqa: PLC0415  only where links are shared
        except ImportError as error:
            raise NvmlError("nvidia-ml-py is missing: install fusco[cuda]") from error
        self._nvml = pynvml
        self._call("nvmlInit")
        handles = [self._call("nvmlDeviceGetHandleByIndex", i) for i in range(self._call("nvmlDeviceGetCount"))]
        found = sorted(((self._place_of(handle), handle) for handle in handles), key=lambda each: each[0])
        self._places, self._handles = [place for place, _ in found], [handle for _, handle in found]
        self.bits_per_s = tuple(map(self._bits_per_s, self._handles))  # of each PCIe link; 0 if unknown

    def index_of(self, bus_id: str) -> int:
        """Return the index of a GPU; ``NvmlError`` if NVML does not know it."""
        domain, bus, device = (int(part, 16) for part in bus_id.split(".", maxsplit=1)[0].split(":"))
        if (domain, bus, device) not in self._places:
            raise NvmlError(f"NVML does not know the GPU at {bus_id}")
        return self._places.index((domain, bus, device))

    def has_nvlink(self, link: int, peer: int) -> bool:
        """Return whether two GPUs are connected by NVLink."""
        handles = (self._handles[link], self._handles[peer])
        status = self._call("nvmlDeviceGetP2PStatus", *handles, self._nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == self._nvml.NVML_P2P_STATUS_OK)

    def free_bytes(self, link: int) -> int:
        """Return the free memory of a GPU, as left by all processes."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handles[link]).free)

    def _place_of(self, handle: Any) -> tuple[int, int, int]:
        info = self._call("nvmlDeviceGetPciInfo", handle)
        return info.domain, info.bus, info.device

    def _bits_per_s(self, handle: Any) -> int:
        try:
            generation = self._call("nvmlDeviceGetMaxPcieLinkGeneration", handle)
            width = self._call("nvmlDeviceGetMaxPcieLinkWidth", handle)
        except NvmlError:
            return 0
        return int(1e9 * _GT_PER_S[generation] * width) if generation < len(_GT_PER_S) else 0

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(f"{name} failed: {error}") from error


@cache
def nvml_links() -> GpuLinks:
    """Return the links of this host; raises ``NvmlError``."""
    return GpuLinks()


def rails_of_links(links: GpuLinks) -> tuple[NamedRail, ...]:
    """Return the two rails of each link, one for each direction, at most as many as the board has room for.

    >>> from types import SimpleNamespace
    >>> [rail.interface for rail in rails_of_links(SimpleNamespace(bits_per_s=(0, 0)))]
    ['gpu0 to host', 'host to gpu0', 'gpu1 to host', 'host to gpu1']
    """
    rails = [
        NamedRail(name, speed)
        for i, speed in enumerate(links.bits_per_s)
        for name in (f"gpu{i} to host", f"host to gpu{i}")
    ]
    return tuple(rails[:MAX_RAILS])

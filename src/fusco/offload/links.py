"""The PCIe links of this host's GPUs, read from NVML: without a context on any of them."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from fusco.rails.board import NamedRail, named_path
from fusco.rails.rail import MAX_RAILS

_P2P_NVLINK, _P2P_OK = 2, 0
_GT_PER_S = (0, 2.5, 5, 8, 16, 32, 64)  # of one PCIe lane, by generation


class NvmlError(OSError):
    """NVML is missing or has failed."""


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy_id", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class Links:
    """The GPUs of this host that NVML knows, in the order of their PCI bus ids: the same in every process."""

    def __init__(self) -> None:
        """Open NVML; raises ``NvmlError``."""
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(f"NVML is missing: {error}") from error
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for i in range(count.value):
            handle, pci = ctypes.c_void_p(), _PciInfo()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(i), ctypes.byref(handle))
            self._call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
            found.append(((pci.domain, pci.bus, pci.device), handle))
        found.sort(key=lambda each: each[0])
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
        status = ctypes.c_int(-1)
        handles = (self._handles[link], self._handles[peer])
        self._call("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(_P2P_NVLINK), ctypes.byref(status))
        return status.value == _P2P_OK

    def free_bytes(self, link: int) -> int:
        """Return the free memory of a GPU, as left by all processes."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handles[link], ctypes.byref(memory))
        return int(memory.free)

    def _bits_per_s(self, handle: ctypes.c_void_p) -> int:
        generation, width = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMaxPcieLinkGeneration", handle, ctypes.byref(generation))
            self._call("nvmlDeviceGetMaxPcieLinkWidth", handle, ctypes.byref(width))
        except NvmlError:
            return 0
        known = generation.value < len(_GT_PER_S)
        return int(1e9 * _GT_PER_S[generation.value] * width.value) if known else 0

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            raise NvmlError(f"{name} failed: {self._library.nvmlErrorString(ctypes.c_int(code)).decode()}")


@cache
def nvml_links() -> Links:
    """Return the links of this host; raises ``NvmlError``."""
    return Links()


def rails_of_links(links: Links) -> tuple[NamedRail, ...]:
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


def links_board() -> Path:
    """Return the board of PCIe links: one for each user and pid namespace, since it names workers by pid."""
    return named_path("links", os.stat("/proc/self/ns/pid").st_ino)

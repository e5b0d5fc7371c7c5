"""Settings of a copier, with the memory that it may take on other GPUs; its machine, and its PCIe links from NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fusco.core.files import links_board
from fusco.core.integers import check_integer
from fusco.offload.driver import cuda_driver
from fusco.offload.mover import MAX_SLOTS
from fusco.rails.board import NamedRail
from fusco.rails.policy import Limits
from fusco.rails.rail import MAX_RAILS

#: Bounds of chunks on PCIe links. Between two launches on a link pass 3 us, so launches are of 8 MB, and two of them
#: are under way: on 2 H200 (2026-11-22) that was 1.83 to 1.94 times one link with copies of 256 MB, 1.91 to 1.96 with
#: 1 GB; 12 and 24 MB were slower with 256 MB, and left an owner that came back 0.89 of its link's speed in 5 ms.
LINK_LIMITS = Limits(chunk_bytes=512 << 10, direct_first=32, direct_depth=40, borrowed_per_rail=32, batch=16)

MB = 1 << 20
_WAYS = ("copy-engines", "threads", "nothing")
_GT_PER_S = (0, 2.5, 5, 8, 16, 32, 64)  # of one PCIe lane, by generation


@dataclass(frozen=True, kw_only=True)
class RelayBudget:
    """Bounds of what a process takes on each relay GPU, and when it gives it back (FuseLink, section 4.2).

    Attributes:
        max_bytes: bytes on a relay GPU at most: the relay buffers, and the process's CUDA context there if it has no
            other use for it, which is most of it.
        low_bytes: free memory of a relay GPU below which everything there is given back.
        high_bytes: free memory above which it may be taken. The distance is what keeps a relay from coming and going.
        max_relays: relay GPUs of a process at most. Host memory limits what more of them would bring.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    max_bytes: int = 1024 * MB
    low_bytes: int = 2048 * MB
    high_bytes: int = 4096 * MB
    max_relays: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, least=0)
        if self.high_bytes < self.low_bytes + self.max_bytes:
            raise ValueError(
                f"high_bytes must be at least low_bytes + max_bytes, or taking a relay's memory would make it low: got "
                f"{self.high_bytes}, {self.low_bytes} + {self.max_bytes}"
            )

    def why_not(self, free_bytes: int, wanted_bytes: int) -> str:
        """Return why a relay GPU may not be used; empty if it may.

        >>> RelayBudget().why_not(8192 * MB, 16 * MB)
        ''
        >>> RelayBudget().why_not(3000 * MB, 16 * MB)
        'only 3,000 MiB of its memory are free, of 4,096 that must be'
        """
        if wanted_bytes > self.max_bytes:
            return f"relays may take {self.max_bytes / MB:,.0f} MiB there, and would take {wanted_bytes / MB:,.0f}"
        if free_bytes < self.high_bytes:
            needed = f"{self.high_bytes / MB:,.0f}"
            return f"only {free_bytes / MB:,.0f} MiB of its memory are free, of {needed} that must be"
        return ""

    def decide(self, free_bytes: int, held_bytes: int) -> Literal["keep", "give back"]:
        """Return what to do with the memory that is held on a relay GPU.

        >>> RelayBudget().decide(3000 * MB, 600 * MB), RelayBudget().decide(1999 * MB, 600 * MB)
        ('keep', 'give back')
        """
        return "give back" if free_bytes < self.low_bytes or held_bytes > self.max_bytes else "keep"


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Settings of a copier.

    Attributes:
        limits: bounds of the scheduler, as of ``fusco.rails``; ``batch`` is the chunks that one
            launch copies at most. Those of connections have no meaning here.
        budget: memory that may be taken on other GPUs.
        relays: the GPUs whose links may be taken, as CUDA numbers them; ``None``: all that NVLink connects, those after
            this one first, as many as the budget allows.
        relays_by: ``"copy-engines"`` moves chunks between GPUs by copy engines (D2 of FuseLink, Figure 6),
            ``"threads"`` by a kernel (D1). ``"nothing"`` borrows no links, and only lends this GPU's while its own
            copies do not need it.
        own_link_by: what moves chunks over the GPU's own link: copy engines (D4), threads (D3), or ``"nothing"``: they
            take relays only. The last two are for measurements.
        min_bytes: copies of less take the GPU's own link as one ``cudaMemcpyAsync``.
        timeout_s: the limit of every wait.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    limits: Limits = LINK_LIMITS
    budget: RelayBudget = field(default_factory=RelayBudget)
    relays: tuple[int, ...] | None = None
    relays_by: Literal["copy-engines", "threads", "nothing"] = "copy-engines"
    own_link_by: Literal["copy-engines", "threads", "nothing"] = "copy-engines"
    min_bytes: int = 16 << 20
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_integer("min_bytes", self.min_bytes, least=0)
        for name in ("relays_by", "own_link_by"):
            if (value := getattr(self, name)) not in _WAYS:
                raise ValueError(f"{name} must be one of {', '.join(_WAYS)}, got {value!r}")
        if self.relays_by == self.own_link_by == "nothing":
            raise ValueError("relays_by and own_link_by must not both be 'nothing'")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if max(self.limits.direct_depth, self.limits.borrowed_per_rail) > MAX_SLOTS:
            raise ValueError(
                f"direct_depth and borrowed_per_rail must be at most {MAX_SLOTS}, got {self.limits.direct_depth}, "
                f"{self.limits.borrowed_per_rail}"
            )


@dataclass(frozen=True)
class Machine:
    """Machine that a copier runs on; tests have their own."""

    driver: Any  # a ``CudaDriver`` or what behaves like one
    links: Callable[[], GpuLinks]  # returns the GPUs of this host
    board: Callable[[], Path]  # returns the file of the board
    current_stream: Callable[[int], int]  # returns the handle of the caller's current stream on a device
    has_threads: bool = True  # whether movers run by themselves; otherwise the owner steps them


def this_machine() -> Machine:
    """Return this machine; raises ``OSError`` where there is no CUDA driver."""
    return Machine(cuda_driver(), nvml_links, links_board, _current_stream)


def _current_stream(device: int) -> int:
    import torch  # noqa: PLC0415  fusco.offload alone does not load it

    return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001  a fortieth of the public way's time


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

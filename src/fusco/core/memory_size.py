"""Memory of one rank's communicator, and of the machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Bytes that a communicator holds on one rank until it is closed. Outputs belong to the caller and do not count.

    ``pool_bytes``, ``routing_bytes``, ``ring_bytes`` and ``control_bytes`` are shared memory, ``private_bytes`` is not.
    """

    pool_bytes: int
    routing_bytes: int
    ring_bytes: int
    control_bytes: int
    private_bytes: int

    @property
    def shared_bytes(self) -> int:
        """All shared memory of a rank; a node needs it ``ranks_per_node`` times."""
        return self.pool_bytes + self.routing_bytes + self.ring_bytes + self.control_bytes

    @property
    def total_bytes(self) -> int:
        """Shared and private memory of a rank."""
        return self.shared_bytes + self.private_bytes


def available_memory_bytes() -> int:
    """Return the kernel's estimate, ``MemAvailable`` (Linux 3.14 or newer); without it, all physical memory."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="utf-8"))
    return int(available[1]) * 1024 if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

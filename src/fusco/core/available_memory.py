"""Memory of this machine that can be allocated without swapping."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes() -> int:
    """Return the kernel's estimate, ``MemAvailable`` (Linux 3.14 or newer); without it, all physical memory."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="utf-8"))
    return int(available[1]) * 1024 if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

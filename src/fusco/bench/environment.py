"""Environment of a measurement: versions, hardware, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

import fusco


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, fusco and its packages, and of ``more`` packages."""
    packages = {name: version(name) for name in ("torch", "numba", "numpy", *more)}
    return {"python": platform.python_version(), "fusco": fusco.__version__, **packages}


def hardware(device: str = "cpu") -> dict[str, str | int | float]:
    """Return the processor, the cores usable by this process and the memory; for ``"cuda"`` also the GPU."""
    page_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(page_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpu": _gpu_name()} if device == "cuda" else {}),
    }


def commit() -> str:
    """Return the commit of the checkout that this package runs from, ``"unknown"`` for an installed package."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607  whichever git the user has
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _gpu_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "unknown"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"

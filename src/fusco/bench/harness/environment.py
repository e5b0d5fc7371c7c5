"""Environment of a measurement, which every record has: versions, hardware, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fusco.core.environment import may_share_gpus
from fusco.core.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only

_Record = TypeVar("_Record", bound="DataclassInstance")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, fusco and its packages, and of ``more`` packages."""
    packages = {name: version(name) for name in ("torch", "numba", "numpy", *more)}
    return {"python": platform.python_version(), "fusco": __version__, **packages}


def hardware(device: str = "cpu") -> dict[str, str | int | float]:
    """Return the processor, the cores usable by this process and the memory; for ``"cuda"`` also the GPU.

    Where ranks may share GPUs, ``num_gpus`` is the number on this machine.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name(0) if device == "cuda" and torch.cuda.is_available() else "unknown"
    shared = {"num_gpus": torch.cuda.device_count()} if device == "cuda" and may_share_gpus() else {}
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(page_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpu": gpu} if device == "cuda" else {}),
        **shared,
    }


@cache
def commit() -> str:
    """Return the commit of fusco's own repository that this package runs from, ``"none"`` if it is not in one.

    A repository that encloses an installation, such as one with a virtual environment in it, is not fusco's.
    """
    return describe_commit(Path(__file__).parents[2])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Fields of every record: see ``versions``, ``hardware`` and ``commit``."""

    versions: dict[str, str] = field(default_factory=versions)
    hardware: dict[str, str | int | float] = field(default_factory=hardware)
    commit: str = field(default_factory=commit)


@dataclass(frozen=True, kw_only=True)
class VerifiedMeasurement(Measurement):
    """Fields of every record of what is verified before it is timed."""

    verified: bool  # whether outputs are as specified
    errors: list[str]  # what was not

    @property
    def is_right(self) -> bool:
        """Verified."""
        return self.verified


def record_of(kind: type[_Record], *sources: object, **values: Any) -> _Record:
    """Return a record (a dataclass) with these values; other fields are the attributes of ``sources`` by their names.

    Earlier sources come first. With a field ``device``, ``hardware`` is that of the device.

    >>> @dataclass
    ... class Row:
    ...     height: int
    ...     name: str = "none"
    >>> record_of(Row, Path("/a/b"), height=2)
    Row(height=2, name='b')
    """
    if "device" in (names := [each.name for each in fields(kind)]) and "hardware" in names:
        device = values.get("device") or next(source.device for source in sources if hasattr(source, "device"))
        values = {"hardware": hardware(device), **values}
    of_sources = {name: getattr(each, name) for each in reversed(sources) for name in names if hasattr(each, name)}
    return kind(**{**of_sources, **values})


def describe_commit(package: Path) -> str:
    """Return the commit of a package folder ``src/fusco`` of fusco's own repository; see ``commit``."""
    try:
        root = Path(_git(package, "rev-parse", "--show-toplevel"))
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # raises for a file that is not tracked
        if root / "src" / "fusco" != package.resolve() or 'name = "fusco"' not in (root / "pyproject.toml").read_text():
            return "none"
        return _git(package, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return "none"


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints in a folder, whatever repository the environment names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(  # noqa: S603  the arguments are those above
        ["git", *arguments],  # noqa: S607  whichever git the user has
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"

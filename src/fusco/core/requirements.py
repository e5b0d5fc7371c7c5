"""Packages that fusco needs: their minimum versions, and checks that they are installed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

LEAST_VERSIONS = {"torch": "2.7", "numba": "0.61", "numpy": "1.26"}  # as in pyproject.toml; a test compares
LEAST_CAPABILITY = (8, 0)  # of a GPU; the kernels use instructions that older ones lack
LEAST_OF_FSDP = {"torch": "2.11", "transformers": "5.9"}


class RequirementError(ImportError):
    """A package that fusco needs is missing or too old."""


@lru_cache(maxsize=1)
def check_torch() -> None:
    """Raise ``RequirementError`` if the installed torch is too old for fusco, without importing it."""
    if installed("torch"):  # else its import raises; torch may be installed without metadata
        _check("fusco", {"torch": LEAST_VERSIONS["torch"]})


def check_fsdp(user: str, packages: tuple[str, ...] = ("torch", "transformers")) -> None:
    """Raise ``RequirementError`` if one of these packages is missing or too old for ``user``, without importing any."""
    _check(user, {name: LEAST_OF_FSDP[name] for name in packages})


def has_cuda_core() -> bool:
    """Return whether cuda-core, which compiles CUDA kernels, is installed."""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None


def check_cuda_core() -> None:
    """Raise ``ValueError`` if cuda-core is not installed."""
    if not has_cuda_core():
        raise ValueError("device 'cuda' needs the package cuda-core: pip install 'cuda-core[cu13]'")


def _check(user: str, least: Mapping[str, str]) -> None:
    lacking = [name for name, number in least.items() if not is_recent(installed(name), number)]
    if lacking:
        needs = " and ".join(f"{name} {least[name]} or newer" for name in lacking)
        found = ", ".join(f"{name} {installed(name) or 'not at all'}" for name in lacking)
        remedy = " ".join(f"'{name}>={least[name]}'" for name in lacking)
        raise RequirementError(f"{user} needs {needs}; installed is {found}: pip install {remedy}")


def installed(package: str) -> str:
    """Return the version of an installed package, ``""`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_recent(number: str, least: str) -> bool:
    """Return whether version ``number`` is at least ``least``, by their leading numbers.

    >>> is_recent("2.11.0+cu130", "2.7"), is_recent("2.6.0", "2.7"), is_recent("", "2.7")
    (True, False, False)
    """
    return _release(number) >= _release(least)


def _release(number: str) -> list[int]:
    """Return the leading numbers of a version: 2, 11, 0 of ``"2.11.0+cu130"``."""
    return [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", number)[0])]

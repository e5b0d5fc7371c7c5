"""Decorator of all functions that numba compiles: at first use, cached on disk under a digest of their sources.

The cache of numba depends on a function's own file only, although the compiled code contains the functions that it
calls. Without a writable folder it raises while a module is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _Cache, _CacheLocator

from fusco.core.announcements import SlowWork
from fusco.core.cache import CacheFolder, find_cache_folder
from fusco.core.sources import digest_of_sources


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that numba compiles in nopython mode; ``options`` are those of ``numba.njit``.

    The compiled function is kept in the folder of ``find_cache_folder``. No file is read before the first call.
    """

    def make(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = _KernelCache(function)  # noqa: SLF001  as its enable_caching does
        return dispatcher

    return make


class _KernelCache(_Cache):
    """Cache that numba queries before it compiles a function, and writes afterwards."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _caches(self) -> list[FunctionCache]:
        """Caches to read, in this order; the last one is written. Empty if there is no folder."""
        try:
            return [_cache_in(folder / "cpu", self._function) for folder in cpu_cache_folder().readable]
        except (OSError, SyntaxError, RuntimeError) as error:
            warnings.warn(f"{self._function.__name__} is compiled in every process anew: {error}", stacklevel=2)
            return []

    @property
    def cache_path(self) -> str | None:
        return self._caches[-1].cache_path if self._caches else None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a function from the first cache that has it; one whose file cannot be read is compiled again."""
        for cache in self._caches:
            try:
                found = cache.load_overload(sig, target_context)
            except Exception:  # noqa: BLE001, S112  a truncated or foreign file: pickle may raise any error
                continue
            if found is not None:
                return found
        _compiling().begin()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a function; warn if that is impossible."""
        _compiling().end()
        folder = cpu_cache_folder()
        folder.warn()
        if folder.used is None or not self._caches:
            return
        cache = self._caches[-1]
        try:
            try:
                cache.save_overload(sig, data)
            except Exception:  # noqa: BLE001  a truncated index: pickle may raise any error
                cache.flush()
                cache.save_overload(sig, data)
        except OSError as error:
            CacheFolder(folder.used, None, error.strerror or str(error)).warn()

    def enable(self) -> None:
        """Do nothing: it is always enabled."""

    def disable(self) -> None:
        """Do nothing: it is always enabled."""

    def flush(self) -> None:
        for cache in self._caches:
            cache.flush()


class _Locator(_CacheLocator):
    """Gives numba's cache a folder whose name changes with the sources."""

    def __init__(self, root: Path, function: Callable[..., Any]) -> None:
        code, module = function.__code__, function.__module__
        self._py_file, self._line = code.co_filename, code.co_firstlineno
        package = sys.modules[module.split(".")[0]].__file__
        self._digest = digest_of_sources(Path(self._py_file), Path(package or self._py_file).parent)
        self._path = root / f"{module}-{self._digest}"

    def get_cache_path(self) -> str:
        return str(self._path)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return str(self._line)

    def ensure_cache_path(self) -> None:
        os.makedirs(self._path, exist_ok=True)


def _cache_in(root: Path, function: Callable[..., Any]) -> FunctionCache:
    locator = _Locator(root, function)

    class Impl(CompileResultCacheImpl):
        _locator_classes: ClassVar[Any] = [SimpleNamespace(from_function=lambda *_: locator)]  # type: ignore[misc]

    class Cache(FunctionCache):
        _impl_class = Impl

    return Cache(function)


@lru_cache(maxsize=1)
def cpu_cache_folder() -> CacheFolder:
    """Return this process's folder for CPU kernels."""
    return find_cache_folder(is_for_cpu=True)


@lru_cache(maxsize=1)
def _compiling() -> SlowWork:
    kept = "once on this machine" if cpu_cache_folder().used else "in every process anew"
    return SlowWork(lambda: f"compiling CPU kernels, {kept}")

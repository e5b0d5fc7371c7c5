"""Decorator of all functions that numba compiles: at first use, cached on disk under a digest of their sources.

The cache of numba depends on a function's own file only, although the compiled code contains the functions that it
calls. Without a writable folder it raises while a module is imported.
"""

from __future__ import annotations

import ast
import hashlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from fusco.core.announcements import SlowWork
from fusco.core.cache import CacheFolder, find_cache_folder


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
    """Cache that numba queries before it compiles a function, and writes afterwards: a file for each signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def cache_path(self) -> str | None:
        """Folder of the function's files in that of all kernels, a new one for other sources; ``None`` if unknown."""
        file, module = self._function.__code__.co_filename, self._function.__module__
        package = sys.modules[module.split(".")[0]].__file__
        try:
            return f"cpu/{module}-{digest_of_sources(Path(file), Path(package or file).parent)}"
        except (OSError, SyntaxError) as error:
            warnings.warn(f"{self._function.__name__} is compiled in every process anew: {error}", stacklevel=2)
            return None

    def _file(self, sig: Any, codegen: Any) -> str:
        """Return the file of a signature, for this machine and these versions of numba and Python."""
        made_for = f"{sig} {codegen.magic_tuple()} {numba.__version__} {sys.implementation.cache_tag}{sys.abiflags}"
        code, digest = self._function.__code__, hashlib.sha256(made_for.encode()).hexdigest()[:16]
        return f"{self.cache_path}/{code.co_name}-{code.co_firstlineno}.{digest}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a function that has been kept; one whose file cannot be read is compiled again."""
        target_context.refresh()
        try:
            if self.cache_path and (path := cpu_cache_folder().find(self._file(sig, target_context.codegen()))):
                return CompileResult._rebuild(target_context, *pickle.loads(path.read_bytes()))  # noqa: S301, SLF001
        except Exception:  # noqa: BLE001, S110  a truncated or foreign file: pickle may raise any error
            pass
        _compiling().begin()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a function; warn if that is impossible."""
        _compiling().end()
        folder = cpu_cache_folder()
        folder.warn()
        assert not data.library.has_dynamic_globals, f"{self._function.__name__} has addresses of this process"
        if self.cache_path and folder.used is not None:
            problem = folder.keep(self._file(sig, data.codegen), dumps(data._reduce()))  # noqa: SLF001
            CacheFolder(folder.used, None, problem).warn()

    def enable(self) -> None:
        """Do nothing: it is always enabled."""

    disable = flush = enable


@lru_cache(maxsize=1)
def cpu_cache_folder() -> CacheFolder:
    """Return this process's folder for CPU kernels."""
    return find_cache_folder(is_for_cpu=True)


@lru_cache(maxsize=1)
def _compiling() -> SlowWork:
    kept = "once on this machine" if cpu_cache_folder().used else "in every process anew"
    return SlowWork(lambda: f"compiling CPU kernels, {kept}")


@cache
def digest_of_sources(file: Path, package: Path) -> str:
    """Return a digest of a Python file and of all files of its package that it imports, directly or indirectly.

    ``package`` is the folder of the top-level package, whose name imports use. Raises ``OSError`` for a file that
    cannot be read, and ``SyntaxError`` for one that is not valid Python.
    """
    found, waiting = set[Path](), [file.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_files(path, package.resolve())
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.name}\n".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _imported_files(path: Path, package: Path) -> tuple[Path, ...]:
    """Return the files of the package that a file imports by absolute names."""
    names = [name for node in _statements(ast.parse(path.read_bytes())) for name in _imported_names(node)]
    inside = [name.split(".")[1:] for name in names if name.split(".")[0] == package.name]
    candidates = [place for parts in inside for place in _places(package.joinpath(*parts))]
    return tuple(dict.fromkeys(place for place in candidates if place.is_file()))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, without a look into expressions, which would take most of the time."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from _statements(child)


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _places(module: Path) -> tuple[Path, Path]:
    return module.with_name(f"{module.name}.py"), module / "__init__.py"

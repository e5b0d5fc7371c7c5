"""C sources of the package, compiled by the system's compiler when first used and kept with the other kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fusco.core.cache import CacheFolder, find_cache_folder
from fusco.core.errors import CompileError

_COMPILERS = ("cc", "gcc", "clang")  # after that of the variable CC
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread")
_TIMEOUT_S = 120.0
_PACKAGE = Path(__file__).parents[1]
#: The libraries of the package, with patterns of their sources. Wheels have each next to its first source.
LIBRARIES = {
    "libfusco-rails": ("rails/engine/*.c",),
    "libfusco-mover": ("offload/mover.c", "rails/engine/board.c", "rails/engine/schedule.c"),
}


def sources_of(name: str) -> list[Path]:
    """Return the sources of a library of the package."""
    return [source for pattern in LIBRARIES[name] for source in sorted(_PACKAGE.glob(pattern))]


@cache
def load_c_library(name: str, *sources: Path) -> ctypes.CDLL:
    """Return C sources as a library of this process, whose functions release the interpreter's lock.

    Raises ``CompileError`` as ``compile_c``, and if the system does not load the library.
    """
    return load(compile_c(name, sources))


def load(path: Path) -> ctypes.CDLL:
    """Load a library that ``compile_c`` has made; ``CompileError`` if the system does not."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # such as a cache on a file system that is mounted noexec
        raise CompileError(f"{path} was compiled but cannot be loaded: {error}; set FUSCO_CACHE_DIR") from error


def compile_c(name: str, sources: Sequence[Path], flags: Sequence[str] = (), folder: CacheFolder | None = None) -> Path:
    """Return C sources as a shared library; compile them first if neither fusco's wheel nor the cache has it.

    Sources may include headers of their folders. ``flags`` are for the compiler, after those of every library.
    Raises ``CompileError`` without a C compiler or a folder that can be written, and with the compiler's message.
    """
    if (packaged := sources[0].with_name(f"{name}.so")).is_file() and folder is None:
        return packaged
    folder = folder or find_cache_folder()
    folders = sorted({source.parent for source in sources})
    headers = [header for each in folders for header in sorted(each.glob("*.h"))]
    text = b"\n".join(path.read_bytes() for path in (*sources, *headers))
    digest = hashlib.sha256(repr([*_FLAGS, *flags, platform.machine()]).encode() + text).hexdigest()[:32]
    file = f"{name}-{digest}.so"
    if (kept := folder.find(file)) is not None:
        return kept
    folder.warn()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, file)
        _compile(name, compiler_of(name), arguments_of(sources, made, flags))
        if problem := folder.keep(file, made.read_bytes()):
            raise CompileError(f"{name} cannot be kept: {problem}; set FUSCO_CACHE_DIR")
    found = folder.find(file)
    assert found is not None
    return found


def arguments_of(sources: Sequence[Path], made: Path, flags: Sequence[str] = ()) -> list[str]:
    """Return the arguments with which a C compiler makes a library."""
    folders = sorted({source.parent for source in sources})
    return [*_FLAGS, *flags, *(f"-I{each}" for each in folders), *map(str, sources), "-o", str(made)]


def compiler_of(name: str) -> list[str]:
    """Return the system's C compiler with its first arguments; ``CompileError`` if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))  # such as "ccache gcc"
    compiler = next(filter(None, map(shutil.which, chosen[:1] or _COMPILERS)), None)
    if compiler is None:
        missing = f"CC={' '.join(chosen)} is not" if chosen else f"none of {', '.join(_COMPILERS)} is"
        raise CompileError(
            f"{name} needs a C compiler, and {missing} installed: install one, such as gcc, or a wheel of fusco, which "
            "has it compiled"
        )
    return [compiler, *chosen[1:]]


def _compile(name: str, compiler: list[str], arguments: Sequence[str]) -> None:
    try:
        subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{name} does not compile with {compiler[0]}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{name} could not be compiled with {compiler[0]}: {error}") from error

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


@cache
def load_c_library(source: Path) -> ctypes.CDLL:
    """Return a C source as a library of this process, whose functions release the interpreter's lock.

    Raises ``CompileError`` as ``compile_c``, and if the system does not load the library.
    """
    path = compile_c(source.stem, [source])
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # such as a cache on a file system that is mounted noexec
        raise CompileError(f"{path} was compiled but cannot be loaded: {error}; set FUSCO_CACHE_DIR") from error


def compile_c(name: str, sources: Sequence[Path], flags: Sequence[str] = (), folder: CacheFolder | None = None) -> Path:
    """Return C sources as a shared library; compile them first if the cache has none of these sources and flags.

    Sources may include headers of their folders. ``flags`` are for the compiler, after those of every library.
    Raises ``CompileError`` without a C compiler or a folder that can be written, and with the compiler's message.
    """
    folder = folder or find_cache_folder()
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    text = b"\n".join(path.read_bytes() for path in (*sources, *headers))
    digest = hashlib.sha256(repr([*_FLAGS, *flags, platform.machine()]).encode() + text).hexdigest()[:32]
    file = f"{name}-{digest}.so"
    if (kept := folder.find(file)) is not None:
        return kept
    folder.warn()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, file)
        _compile(name, [*_FLAGS, *flags, *map(str, sources), "-o", str(made)])
        if problem := folder.keep(file, made.read_bytes()):
            raise CompileError(f"{name} cannot be kept: {problem}; set FUSCO_CACHE_DIR")
    found = folder.find(file)
    assert found is not None
    return found


def _compile(name: str, arguments: Sequence[str]) -> None:
    chosen = shlex.split(os.environ.get("CC", ""))  # such as "ccache gcc"
    compiler = next(filter(None, map(shutil.which, chosen[:1] or _COMPILERS)), None)
    if compiler is None:
        missing = f"CC={' '.join(chosen)} is not" if chosen else f"none of {', '.join(_COMPILERS)} is"
        raise CompileError(f"{name} needs a C compiler, and {missing} installed")
    command = [compiler, *chosen[1:], *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{name} does not compile with {compiler}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{name} could not be compiled with {compiler}: {error}") from error

"""C sources of the package, compiled by the system's compiler when first used and kept with the other kernels."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fusco.core.cache import find_cache_folder
from fusco.core.errors import CompileError

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread")
_TIMEOUT_S = 60.0


@cache
def load_c_library(source: Path) -> ctypes.CDLL:
    """Return a C source as a library of this process; ``CompileError`` if it cannot be compiled.

    Its functions release the interpreter's lock.
    """
    folder = find_cache_folder(is_for_cpu=True)
    digest = hashlib.sha256(source.read_bytes() + f"{platform.machine()} {_FLAGS}".encode()).hexdigest()[:16]
    name = f"{source.stem}-{digest}.so"
    for readable in folder.readable:
        if (readable / "c" / name).exists():
            return ctypes.CDLL(str(readable / "c" / name))
    folder.warn()
    if folder.used is None:
        with tempfile.TemporaryDirectory() as temporary:  # the library stays mapped
            return ctypes.CDLL(str(_compile(source, Path(temporary) / name)))
    (folder.used / "c").mkdir(exist_ok=True)
    return ctypes.CDLL(str(_compile(source, folder.used / "c" / name)))


def _compile(source: Path, target: Path) -> Path:
    """Compile to a temporary file first: no process loads a partial library."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"{source.name} needs a C compiler, and none of {', '.join(_COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *_FLAGS, "-o", str(made), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603
        except subprocess.CalledProcessError as error:
            raise CompileError(f"{source.name} does not compile with {compiler}: {error.stderr.strip()}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{source.name} could not be compiled with {compiler}: {error}") from error
        made.replace(target)
    return target

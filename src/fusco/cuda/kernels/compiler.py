"""From CUDA C++ to machine code, at run time, by NVRTC through ``cuda.core``; results are kept on disk.

Compiling needs neither a GPU nor a driver, so that any machine can check that all kernels compile.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path

from fusco.core.errors import CompileError

SOURCE_DIR = Path(__file__).parent / "source"
CACHE_DIR_VARIABLE = "FUSCO_CACHE_DIR"


def default_cache_dir() -> Path:
    """``$FUSCO_CACHE_DIR``, or ``fusco`` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusco"


class Compiler:
    """Compiles for one architecture, such as ``"sm_90"``."""

    def __init__(self, arch: str, cache_dir: Path | None = None) -> None:
        self.arch = arch
        self._cache_dir = cache_dir or default_cache_dir()
        self._has_warned = False

    def compile(self, name: str, constants: Mapping[str, object]) -> bytes:
        """The cubin of ``source/NAME.cu`` with these macros defined, from the disk cache if it is there.

        Raises ``CompileError`` with the compiler's words.
        """
        path = self._cache_dir / f"{name}-{self._key(name, constants)}.cubin"
        try:
            return path.read_bytes()
        except OSError:
            pass  # not there yet
        cubin = self._compile(name, constants)
        self._keep(path, cubin)
        return cubin

    def _compile(self, name: str, constants: Mapping[str, object]) -> bytes:
        from cuda.core import Program, ProgramOptions  # noqa: PLC0415  of the extra fusco[cuda]

        options = ProgramOptions(
            name=f"{name}.cu",
            std="c++17",
            arch=self.arch,
            include_path=str(SOURCE_DIR),
            define_macro=[(key, str(value)) for key, value in constants.items()],
        )
        try:
            code = Program((SOURCE_DIR / f"{name}.cu").read_text(), "c++", options).compile("cubin").code
        except Exception as error:  # NVRTC's errors have no common base that is public
            what = ", ".join(f"{key}={value}" for key, value in constants.items())
            raise CompileError(f"kernel {name} does not compile for {self.arch} with {what}: {error}") from error
        assert isinstance(code, bytes)
        return code

    def _key(self, name: str, constants: Mapping[str, object]) -> str:
        parts = [_sources(), name, self.arch, self._versions, repr(sorted((k, str(v)) for k, v in constants.items()))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @cached_property
    def _versions(self) -> str:
        from cuda.bindings import nvrtc  # noqa: PLC0415  of the extra fusco[cuda]

        return f"{version('cuda-core')} {nvrtc.nvrtcVersion()}"

    def _keep(self, path: Path, cubin: bytes) -> None:
        """Write a file that nobody ever sees half-written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.write(cubin)
                    file.flush()
                    temporary.chmod(0o644)  # others who share the folder may read it
                    temporary.replace(path)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            self._warn(path.parent, error)

    def _warn(self, folder: Path, error: OSError) -> None:
        """Once, since the words name another temporary file every time."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"compiled kernels cannot be kept in {folder} ({error}); every process compiles them anew. "
            f"Set {CACHE_DIR_VARIABLE} to a folder that can be written",
            stacklevel=2,
        )


@lru_cache(maxsize=1)
def _sources() -> str:
    """All sources: a kernel's own and what it may include."""
    return "\n".join(path.read_text() for path in sorted(SOURCE_DIR.glob("*.cu*")))

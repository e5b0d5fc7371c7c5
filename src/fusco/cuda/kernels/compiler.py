"""Run-time compiler of the CUDA sources: NVRTC through ``cuda.core``, with a cache on disk.

It needs neither a GPU nor a driver, so any machine can check that all kernels compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path

from fusco.core.announcements import SlowWork
from fusco.core.cache import CacheFolder, find_cache_folder
from fusco.core.errors import CompileError

SOURCE_DIR = Path(__file__).parent / "source"


class Compiler:
    """Compiles for one architecture, such as ``"sm_90"``, and caches the results in a folder, if one is writable."""

    def __init__(self, arch: str, cache_dir: Path | None = None) -> None:
        self.arch = arch
        self.folder = CacheFolder(cache_dir, cache_dir) if cache_dir else find_cache_folder()
        kept = "once on this machine" if self.folder.used else "in every process anew"
        self._compiling = SlowWork(lambda: f"compiling CUDA kernels for {arch}, {kept}")

    def compile(self, name: str, constants: Mapping[str, object]) -> bytes:
        """Return the cubin of ``source/NAME.cu`` with these macros defined, from the disk cache if possible.

        Raises ``CompileError`` with the compiler's message.
        """
        file = f"{name}-{self._key(name, constants)}.cubin"
        for folder in self.folder.readable:
            try:
                return (folder / file).read_bytes()
            except OSError:
                pass  # not cached yet
        self._compiling.begin()
        try:
            cubin = self._compile(name, constants)
        finally:
            self._compiling.end()
        self._keep(file, cubin)
        return cubin

    def _compile(self, name: str, constants: Mapping[str, object]) -> bytes:
        from cuda.core import Program, ProgramOptions  # noqa: PLC0415  of the extra fusco[cuda]

        macros = [(key, str(value)) for key, value in constants.items()]
        options = ProgramOptions(
            name=f"{name}.cu", std="c++17", arch=self.arch, include_path=str(SOURCE_DIR), define_macro=macros
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

        try:
            return f"{version('cuda-core')} {nvrtc.nvrtcVersion()}"
        except RuntimeError as error:  # cuda-core without the packages of its extra, and no CUDA toolkit
            raise CompileError(f"NVRTC, which compiles CUDA kernels, cannot be loaded: {error}") from error

    def _keep(self, file: str, cubin: bytes) -> None:
        self.folder.warn()
        if self.folder.used is not None and (problem := self.folder.keep(file, cubin)):
            # Warn once: the error names another temporary file every time.
            self.folder = CacheFolder(self.folder.used, None, problem)
            self.folder.warn()


@lru_cache(maxsize=1)
def _sources() -> str:
    """Return all sources: any kernel may include any header."""
    return "\n".join(path.read_text() for path in sorted(SOURCE_DIR.glob("*.cu*")))

"""Compiles the C libraries into wheels: for manylinux with ziglang, else with the system's compiler for this machine.

``FUSCO_WHEEL_MACHINE=aarch64`` compiles for another machine with ziglang. Editable installs compile when first used.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GLIBC = (2, 28)  # as PyTorch's wheels


class CompileLibraries(BuildHookInterface):
    """Adds the compiled libraries to a wheel, which without a compiler is pure, and says so."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; see hatchling."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from fusco.core import c_library  # noqa: PLC0415  its path was not known before
        from fusco.core.errors import CompileError  # noqa: PLC0415

        machine = os.environ.get("FUSCO_WHEEL_MACHINE", platform.machine())
        has_zig = importlib.util.find_spec("ziglang") is not None
        if machine != platform.machine() and not has_zig:
            raise RuntimeError(f"to compile for {machine} on {platform.machine()}, ziglang must be installed")
        target = f"{machine}-linux-gnu.{_GLIBC[0]}.{_GLIBC[1]}"
        self._made = tempfile.TemporaryDirectory()
        try:
            compiler = (
                [sys.executable, "-m", "ziglang", "cc", "-target", target]
                if has_zig
                else c_library.compiler_of("fusco")
            )
        except CompileError as error:
            self.app.display_warning(f"the wheel is pure, and FUSCO_RAILS needs a C compiler where it runs: {error}")
            return
        for name in c_library.LIBRARIES:
            sources, made = c_library.sources_of(name), Path(self._made.name, f"{name}.so")
            subprocess.run([*compiler, *c_library.arguments_of(sources, made)], check=True)  # noqa: S603
            place = sources[0].with_name(made.name).relative_to(Path(self.root, "src"))
            build_data["force_include"][str(made)] = str(place)
        build_data["pure_python"] = False
        tag = f"manylinux_{_GLIBC[0]}_{_GLIBC[1]}" if has_zig else "linux"
        build_data["tag"] = f"py3-none-{tag}_{machine}"

    def finalize(self, *_: Any) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_made"):
            self._made.cleanup()

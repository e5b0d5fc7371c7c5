"""``fusco doctor``: the backends that this machine can run, what is missing, and how to install it.

Each check tries one requirement of the library and has a remedy.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import typer
from rich.markup import escape

import fusco
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, conclusion
from fusco.core.cache import CACHE_DIR_VARIABLE, NUMBA_CACHE_DIR_VARIABLE, find_cache_folder
from fusco.core.requirements import LEAST_CAPABILITY, LEAST_VERSIONS, installed, is_recent

_State = Literal["ok", "missing", "optional"]
_Outcome = tuple[str, str]  # what a check has found, and what to do; "" for nothing

_INSTALL_CUDA_CORE = "pip install 'cuda-core[cu13]'"
_CAPABILITY_WITHOUT_GPU = (9, 0)  # that kernels are compiled for, to try
_OF_GPUS = ("GPUs", "CUDA driver", "cuda.core (compiles CUDA kernels)", "CUDA kernels")  # checks
_CUDA_OF_PACKAGE = 13  # major version of CUDA that this installs
# Drivers by the major version of CUDA whose binaries they load
# (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
_LEAST_DRIVERS = {12: 525, 13: 580}


def doctor(json: options.JsonFile = None) -> None:
    """Check what this machine can run and what is missing; exit code 1 if not even the CPU backend works."""
    from fusco.bench.harness.json_lines import write_json_lines

    findings = examine()
    console = new_console(json)
    console.print(_table(findings))
    console.print(conclusion(_found(findings)), soft_wrap=True)
    write_json_lines(findings, json)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Finding:
    """One check. ``state`` is ``missing`` only for requirements of the CPU backend."""

    check: str
    state: _State
    found: str
    remedy: str = ""


def _table(findings: Sequence[Finding]) -> ResultTable:
    columns = ("check", "", "found, and what to do")
    table = ResultTable("fusco doctor", columns, left=columns)
    for finding in findings:
        colour = {"ok": "green", "missing": "red", "optional": "yellow"}[finding.state]
        # Escaped: a remedy may name an extra in brackets, which is not markup.
        to_do = f"; to do: {finding.remedy}" * bool(finding.remedy)
        table.add_row(finding.check, f"[{colour}]{finding.state}[/]", escape(finding.found + to_do))
    return table


def _found(findings: Sequence[Finding]) -> str:
    """Return what this machine can run, and what else there is to do."""
    missing, optional = (
        ", ".join(each.check for each in findings if each.state == state) for state in ("missing", "optional")
    )
    runs = f"fusco does not run here: {missing}" if missing else "fusco runs here on CPUs"
    has_gpus = not missing and all(each.state == "ok" for each in findings if each.check in _OF_GPUS)
    return runs + " and GPUs" * has_gpus + f"; optional: {optional}" * bool(optional)


def _machine() -> _Outcome:
    from fusco.bench.harness.environment import hardware

    machine = hardware()
    return f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB", ""


def _system() -> _Outcome:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return found, "" if sys.platform == "linux" else "fusco needs Linux: unnamed shared memory and /proc"


def _packages() -> _Outcome:
    found = {"fusco": fusco.__version__, **{name: installed(name) for name in LEAST_VERSIONS}}
    text = ", ".join(f"{name} {number or 'not installed'}" for name, number in found.items())
    old = [f"'{name}>={least}'" for name, least in LEAST_VERSIONS.items() if not is_recent(found[name], least)]
    return text, f"pip install {' '.join(old)}" if old else ""


def _shared_memory() -> _Outcome:
    from fusco.control.shared_segment import SHARED_MEMORY_DIR, SharedSegment
    from fusco.core.errors import SharedMemoryError

    try:
        with SharedSegment.create(1 << 16) as segment, SharedSegment.open_peer(segment.address) as peer:
            segment.memory[0] = 1
            is_shared = bool(peer.memory[0])
    except SharedMemoryError as error:
        return str(error), f"a tmpfs on {SHARED_MEMORY_DIR}, and /proc mounted"
    assert is_shared
    return f"unnamed segments in {SHARED_MEMORY_DIR} can be created and opened by peers", ""


def _room() -> _Outcome:
    from fusco.control.shared_segment import free_bytes
    from fusco.core.config import Capacity
    from fusco.core.topology import Topology

    capacity = Capacity(max_tokens_per_rank=8192, max_bytes_per_token=14336, num_topk=8)
    needed = fusco.memory_size_hint(Topology.of_equal_nodes(4, 2), capacity).shared_bytes
    free = free_bytes()
    found = (
        f"{free / 2**30:.1f} GiB free; "
        f"a rank with 8192 tokens of 14,336 bytes on 2 nodes needs {needed / 2**30:.2f} GiB"
    )
    return found, "in a container: --shm-size; else remount /dev/shm larger" if free < needed else ""


def _cache() -> _Outcome:
    """Find the folders of compiled kernels; CPU kernels may have another one than CUDA kernels."""
    cuda, cpu = find_cache_folder(), find_cache_folder(is_for_cpu=True)
    of_cpu = f"; CPU kernels {cpu.describe()}" if cpu != cuda else ""
    remedy = (
        f"set {CACHE_DIR_VARIABLE} to a folder that only you can write ({NUMBA_CACHE_DIR_VARIABLE} does for CPU "
        "kernels), or fill it with fusco warm-up"
    )
    return cuda.describe() + of_cpu, remedy if cuda.problem or cpu.problem else ""


def _kernels() -> _Outcome:
    from numba.core import config

    if getattr(config, "DISABLE_JIT", 0):
        return "NUMBA_DISABLE_JIT keeps numba from compiling", "unset NUMBA_DISABLE_JIT"
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    warm_up_cpu()
    return "compiled by numba, and run", ""


def _gloo() -> _Outcome:
    import torch.distributed as dist

    from fusco.bench.ranks.progress import check_loopback

    if not (dist.is_available() and dist.is_gloo_available()):
        return "not in this torch", "a torch wheel from PyPI has it"
    try:
        check_loopback()
    except OSError as error:
        return f"in this torch, but {error.strerror}", "ip link set lo up"
    return "in this torch", ""


def _open_files() -> _Outcome:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files allowed; a rank needs about 4 for every other rank"
    return found, "" if soft >= 1024 else "ulimit -n 4096"


def _capabilities() -> list[tuple[int, int]]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def _gpus() -> _Outcome:
    import torch

    if not (capabilities := _capabilities()):
        return "none that torch can use", "a torch built for CUDA on a machine with GPUs"
    named = [f"{torch.cuda.get_device_name(i)} ({major}.{minor})" for i, (major, minor) in enumerate(capabilities)]
    least, usable = ".".join(map(str, LEAST_CAPABILITY)), [each >= LEAST_CAPABILITY for each in capabilities]
    remedy = f"GPUs of compute capability {least} (A100) or newer"
    if any(usable):
        remedy += (
            f"; CUDA_VISIBLE_DEVICES={','.join(str(i) for i, each in enumerate(usable) if each)} leaves out others"
        )
    return f"{', '.join(named)}; in brackets compute capability", "" if all(usable) else remedy


def _driver() -> _Outcome:
    import ctypes

    try:
        from cuda.bindings import nvrtc

        needed = int(nvrtc.nvrtcVersion()[1])
    except (ImportError, RuntimeError):  # no bindings, or no NVRTC
        needed = _CUDA_OF_PACKAGE
    least = f", {_LEAST_DRIVERS[needed]} or newer" if needed in _LEAST_DRIVERS else ""
    remedy = f"an NVIDIA driver for CUDA {needed}{least}: it loads what NVRTC {needed} compiles"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"none: {error}", remedy
    number = ctypes.c_int()
    if result := driver.cuDriverGetVersion(ctypes.byref(number)):
        return f"its version is unknown (error {result} of cuDriverGetVersion)", remedy
    found = f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    return found, "" if number.value // 1000 >= needed else remedy


def _peers() -> _Outcome:
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num < 2:
        return f"{num} GPUs", "two GPUs or more, joined by NVLink"
    pairs = combinations(range(num), 2)
    if apart := [f"{i} and {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]:
        return f"not {', '.join(apart)}", "nvidia-smi topo -m shows how GPUs are joined"
    return f"all {num} reach each other", ""


def _cuda_kernels() -> _Outcome:
    import ctypes
    import tempfile
    from pathlib import Path

    from fusco.core.requirements import has_cuda_core

    if not has_cuda_core():
        return "not tried without cuda.core", _INSTALL_CUDA_CORE
    from fusco.core.errors import CompileError
    from fusco.cuda.kernels.compiler import Compiler
    from fusco.cuda.kernels.copy_segments import CopyArgs

    constants = {"ARGUMENT_BYTES": ctypes.sizeof(CopyArgs), "NUM_THREADS": 256}
    usable = {each for each in _capabilities() if each >= LEAST_CAPABILITY} or {_CAPABILITY_WITHOUT_GPU}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for major, minor in sorted(usable):
                Compiler(f"sm_{major}{minor}", Path(folder)).compile("copy_segments", constants)
    except CompileError as error:
        return str(error), f"a cuda-core that brings NVRTC: {_INSTALL_CUDA_CORE}"
    return "compiled by NVRTC when first used", ""


def _cuda_core() -> _Outcome:
    from fusco.core.requirements import has_cuda_core

    return ("installed", "") if has_cuda_core() else ("not installed", _INSTALL_CUDA_CORE)


def _nccl() -> _Outcome:
    import torch.distributed as dist

    return ("in this torch", "") if dist.is_nccl_available() else ("not in this torch", "a torch built for CUDA")


def _rails() -> _Outcome:
    from fusco.core.errors import CompileError
    from fusco.rails.binding import library_path
    from fusco.rails.nccl import nccl_version, why_not_nccl
    from fusco.rails.rail import discover_rails

    version = nccl_version()
    if why_not := why_not_nccl(version):
        return why_not, "a torch with such an NCCL"
    try:
        library_path()
    except CompileError as error:
        return str(error), "a C compiler, such as gcc, and its headers"
    try:
        names = ", ".join(rail.interface for rail in discover_rails())
    except ValueError as error:
        return f"the plugin compiles, but {error}", "network interfaces between hosts"
    if not version:
        return f"the plugin compiles; this torch has no NCCL to load it; rails {names}", "a torch built for CUDA"
    return f"the plugin compiles; NCCL {'.'.join(map(str, version))} loads it; rails {names}", ""


# Names of the checks, and the state of one that finds something to do or that cannot run.
_CHECKS: tuple[tuple[str, Callable[[], _Outcome], _State, _State], ...] = (
    ("machine", _machine, "missing", "missing"),
    ("system", _system, "missing", "missing"),
    ("packages", _packages, "missing", "missing"),
    ("shared memory", _shared_memory, "missing", "missing"),
    ("room for segments", _room, "optional", "missing"),
    ("cache of compiled kernels", _cache, "optional", "missing"),
    ("CPU kernels", _kernels, "missing", "missing"),
    ("gloo (process groups on the CPU)", _gloo, "missing", "missing"),
    ("open files", _open_files, "optional", "missing"),
    ("GPUs", _gpus, "optional", "optional"),
    ("CUDA driver", _driver, "optional", "optional"),
    ("GPUs that reach each other", _peers, "optional", "optional"),
    ("cuda.core (compiles CUDA kernels)", _cuda_core, "optional", "optional"),
    ("CUDA kernels", _cuda_kernels, "optional", "optional"),
    ("NCCL (between nodes on CUDA)", _nccl, "optional", "optional"),
    ("NCCL over rails (fusco.rails.nccl_plugin)", _rails, "optional", "optional"),
)


def examine() -> list[Finding]:
    """Run all checks, those of the CPU backend first. A check that raises is a finding, and the others still run."""
    return [_examine(*check) for check in _CHECKS]


def _examine(name: str, check: Callable[[], _Outcome], if_lacking: _State, if_failing: _State) -> Finding:
    try:
        found, remedy = check()
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything, often when imported
        found = f"the check failed: {type(error).__name__}: {error}"
        return Finding(name, if_failing, found, "repair the installation, starting with the rows above")
    return Finding(name, if_lacking if remedy else "ok", found, remedy)

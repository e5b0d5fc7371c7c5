"""The checks of ``fusco doctor``: each tries one requirement of the library and has a remedy."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import fusco
from fusco.core.cache import CACHE_DIR_VARIABLE, NUMBA_CACHE_DIR_VARIABLE, find_cache_folder
from fusco.core.requirements import LEAST_VERSIONS, installed, is_recent

# Names of checks: each has a row, even if the check cannot run.
_ROOM, _KERNELS, _CUDA_KERNELS = "room for segments", "CPU kernels", "CUDA kernels"
_CACHE = "cache of compiled kernels"
_GLOO, _NCCL = "gloo (process groups on the CPU)", "NCCL (between nodes on CUDA)"
_RAILS = "NCCL over rails (fusco.rails.nccl_plugin)"
_PEERS, _CUDA_CORE = "GPUs that reach each other", "cuda.core (compiles CUDA kernels)"


@dataclass(frozen=True)
class Finding:
    """One check. ``state`` is ``missing`` only for requirements of the CPU backend."""

    check: str
    state: Literal["ok", "missing", "optional"]
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks, those of the CPU backend first. A check that raises is a finding, and the others still run."""
    needed: dict[str, Callable[[], Finding]] = {
        "machine": _machine,
        "system": _system,
        "packages": _packages,
        "shared memory": _shared_memory,
        _ROOM: _room,
        _CACHE: _cache,
        _KERNELS: _kernels,
        _GLOO: _gloo,
        "open files": _open_files,
    }
    optional: dict[str, Callable[[], Finding]] = {
        "GPUs": _gpus,
        _PEERS: _peers,
        _CUDA_CORE: _cuda_core,
        _CUDA_KERNELS: _cuda_kernels,
        _NCCL: _nccl,
        _RAILS: _rails,
    }
    return [
        *(_try(name, check, "missing") for name, check in needed.items()),
        *(_try(name, check, "optional") for name, check in optional.items()),
    ]


def _try(name: str, check: Callable[[], Finding], state: Literal["missing", "optional"]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything, often when imported
        found = f"the check failed: {type(error).__name__}: {error}"
        return Finding(name, state, found, "repair the installation, starting with the rows above")


def _machine() -> Finding:
    from fusco.bench.environment import hardware

    machine = hardware()
    return Finding("machine", "ok", f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB")


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding("system", "missing", found, "fusco needs Linux: unnamed shared memory and /proc")
    return Finding("system", "ok", found)


def _packages() -> Finding:
    found = {"fusco": fusco.__version__, **{name: installed(name) for name in LEAST_VERSIONS}}
    text = ", ".join(f"{name} {number or 'not installed'}" for name, number in found.items())
    old = [name for name, least in LEAST_VERSIONS.items() if not is_recent(found[name], least)]
    if old:
        needed = " ".join(f"'{name}>={LEAST_VERSIONS[name]}'" for name in old)
        return Finding("packages", "missing", text, f"pip install {needed}")
    return Finding("packages", "ok", text)


def _shared_memory() -> Finding:
    from fusco.control.shared_segment import SHARED_MEMORY_DIR, SharedSegment
    from fusco.core.errors import SharedMemoryError

    try:
        with SharedSegment.create(1 << 16) as segment, SharedSegment.open_peer(segment.address) as peer:
            segment.memory[0] = 1
            is_shared = bool(peer.memory[0])
    except SharedMemoryError as error:
        return Finding("shared memory", "missing", str(error), f"a tmpfs on {SHARED_MEMORY_DIR}, and /proc mounted")
    assert is_shared
    return Finding("shared memory", "ok", f"unnamed segments in {SHARED_MEMORY_DIR} can be created and opened by peers")


def _room() -> Finding:
    from fusco.api.memory_size import memory_size_hint
    from fusco.control.shared_segment import free_bytes
    from fusco.core.config import Capacity
    from fusco.core.topology import Topology

    capacity = Capacity(max_tokens_per_rank=8192, max_bytes_per_token=14336, num_topk=8)
    needed = memory_size_hint(Topology.of_equal_nodes(4, 2), capacity).shared_bytes
    free = free_bytes()
    found = (
        f"{free / 2**30:.1f} GiB free; a rank with 8192 tokens of 14,336 bytes on 2 nodes needs {needed / 2**30:.2f}"
    )
    if free < needed:
        return Finding(_ROOM, "optional", found, "in a container: --shm-size; else remount /dev/shm larger")
    return Finding(_ROOM, "ok", found)


def _cache() -> Finding:
    """Find the folders of compiled kernels; CPU kernels may have another one than CUDA kernels."""
    cuda, cpu = find_cache_folder(), find_cache_folder(is_for_cpu=True)
    of_cpu = f"; CPU kernels {cpu.describe()}" if cpu != cuda else ""
    problem = cuda.problem or cpu.problem
    remedy = (
        f"set {CACHE_DIR_VARIABLE} to a folder that can be written ({NUMBA_CACHE_DIR_VARIABLE} does for CPU kernels), "
        "or fill it with fusco warm-up"
    )
    return Finding(_CACHE, "optional" if problem else "ok", cuda.describe() + of_cpu, remedy if problem else "")


def _kernels() -> Finding:
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    warm_up_cpu()
    return Finding(_KERNELS, "ok", "compiled by numba, and run")


def _gloo() -> Finding:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return Finding(_GLOO, "ok", "in this torch")
    return Finding(_GLOO, "missing", "not in this torch", "a torch wheel from PyPI has it")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files allowed; a rank needs about 4 for every other rank"
    return Finding("open files", "ok" if soft >= 1024 else "optional", found, "" if soft >= 1024 else "ulimit -n 4096")


def _gpus() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("GPUs", "ok", ", ".join(names))
    return Finding("GPUs", "optional", "none that torch can use", "a torch built for CUDA on a machine with GPUs")


def _peers() -> Finding:
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num < 2:
        return Finding(_PEERS, "optional", f"{num} GPUs", "two GPUs or more, joined by NVLink")
    apart = [
        f"{i} and {j}" for i in range(num) for j in range(i + 1, num) if not torch.cuda.can_device_access_peer(i, j)
    ]
    if apart:
        return Finding(_PEERS, "optional", f"not {', '.join(apart)}", "nvidia-smi topo -m shows how GPUs are joined")
    return Finding(_PEERS, "ok", f"all {num} reach each other")


def _cuda_kernels() -> Finding:
    import ctypes
    import tempfile
    from pathlib import Path

    from fusco.api.validation import has_cuda_core

    if not has_cuda_core():
        return Finding(_CUDA_KERNELS, "optional", "not tried without cuda.core", "pip install 'cuda-core[cu13]'")
    from fusco.core.errors import CompileError
    from fusco.cuda.kernels.compiler import Compiler
    from fusco.cuda.kernels.copy_segments import CopyArgs

    constants = {"ARGUMENT_BYTES": ctypes.sizeof(CopyArgs), "NUM_THREADS": 256}
    try:
        with tempfile.TemporaryDirectory() as folder:
            Compiler("sm_90", Path(folder)).compile("copy_segments", constants)
    except CompileError as error:
        remedy = "a cuda-core that brings NVRTC: pip install 'cuda-core[cu13]'"
        return Finding(_CUDA_KERNELS, "optional", str(error), remedy)
    return Finding(_CUDA_KERNELS, "ok", "compiled by NVRTC when first used")


def _cuda_core() -> Finding:
    from fusco.api.validation import has_cuda_core

    if has_cuda_core():
        return Finding(_CUDA_CORE, "ok", "installed")
    return Finding(_CUDA_CORE, "optional", "not installed", "pip install 'cuda-core[cu13]'")


def _nccl() -> Finding:
    import torch.distributed as dist

    if dist.is_nccl_available():
        return Finding(_NCCL, "ok", "in this torch")
    return Finding(_NCCL, "optional", "not in this torch", "a torch built for CUDA")


def _rails() -> Finding:
    from fusco.core.errors import CompileError
    from fusco.rails.nccl import nccl_version, plugin_path, why_not_nccl
    from fusco.rails.rail import discover_rails

    version = nccl_version()
    if why_not := why_not_nccl(version):
        return Finding(_RAILS, "optional", why_not, "a torch with such an NCCL")
    try:
        plugin_path()
    except CompileError as error:
        return Finding(_RAILS, "optional", str(error), "a C compiler, such as gcc, and its headers")
    try:
        names = ", ".join(rail.interface for rail in discover_rails())
    except ValueError as error:
        return Finding(_RAILS, "optional", f"the plugin compiles, but {error}", "network interfaces between hosts")
    known = f"NCCL {'.'.join(map(str, version))} loads it" if version else "this torch has no NCCL to load it"
    state: Literal["ok", "optional"] = "ok" if version else "optional"
    remedy = "" if version else "a torch built for CUDA"
    return Finding(_RAILS, state, f"the plugin compiles; {known}; rails {names}", remedy)

"""The checks of ``fusco doctor``: each tries what the library will need, and knows a remedy."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from fusco.api.validation import has_cuda_core
from fusco.bench.environment import hardware, versions

LEAST_VERSIONS = {"torch": "2.6", "numba": "0.61", "numpy": "1.26"}  # as in pyproject.toml; a test compares
_NCCL = "NCCL (between nodes on CUDA)"


@dataclass(frozen=True)
class Finding:
    """One check. ``state`` is ``missing`` only for what the CPU backend cannot do without."""

    check: str
    state: Literal["ok", "missing", "optional"]
    found: str
    remedy: str = ""

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


def examine() -> list[Finding]:
    """Run all checks, those of the CPU backend first."""
    checks: tuple[Callable[[], Finding], ...] = (
        _machine,
        _system,
        _packages,
        _shared_memory,
        _room,
        _kernels,
        _gloo,
        _open_files,
        _gpus,
        _peers,
        _cuda_core,
        _cuda_kernels,
        _nccl,
    )
    return [check() for check in checks]


def _machine() -> Finding:
    machine = hardware()
    return Finding("machine", "ok", f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB")


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding("system", "missing", found, "fusco needs Linux: unnamed shared memory and /proc")
    if not hasattr(os, "pidfd_open"):
        return Finding("system", "missing", found, "a Python built with pidfd_open (any for Linux 5.3 and newer)")
    return Finding("system", "ok", found)


def _packages() -> Finding:
    found = versions()
    text = ", ".join(f"{name} {number}" for name, number in found.items() if name != "python")
    old = [name for name, least in LEAST_VERSIONS.items() if _release(found[name]) < _release(least)]
    if old:
        needed = " ".join(f"'{name}>={LEAST_VERSIONS[name]}'" for name in old)
        return Finding("packages", "missing", text, f"pip install {needed}")
    return Finding("packages", "ok", text)


def _release(number: str) -> list[int]:
    """The leading numbers of a version: ``"2.11.0+cu130"`` is 2, 11, 0."""
    return [int(part) for part in re.match(r"[\d.]*", number)[0].split(".") if part]  # type: ignore[index]  # it matches


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
    return Finding("shared memory", "ok", f"unnamed segments in {SHARED_MEMORY_DIR} can be made and opened by peers")


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
        return Finding(
            "room for segments", "optional", found, "in a container: --shm-size; else remount /dev/shm larger"
        )
    return Finding("room for segments", "ok", found)


def _kernels() -> Finding:
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    warm_up_cpu()
    return Finding("CPU kernels", "ok", "compiled by numba and cached")


def _gloo() -> Finding:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return Finding("gloo (between nodes, CPU)", "ok", "in this torch")
    return Finding("gloo (between nodes, CPU)", "missing", "not in this torch", "a torch wheel from PyPI has it")


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

    check = "GPUs that reach each other"
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num < 2:
        return Finding(check, "optional", f"{num} GPUs", "two GPUs or more, joined by NVLink")
    apart = [
        f"{i} and {j}" for i in range(num) for j in range(i + 1, num) if not torch.cuda.can_device_access_peer(i, j)
    ]
    if apart:
        return Finding(check, "optional", f"not {', '.join(apart)}", "nvidia-smi topo -m shows how GPUs are joined")
    return Finding(check, "ok", f"all {num}, each every other")


def _cuda_kernels() -> Finding:
    import ctypes
    import tempfile
    from pathlib import Path

    check = "CUDA kernels"
    if not has_cuda_core():
        return Finding(check, "optional", "not tried without cuda.core", "pip install 'cuda-core[cu13]'")
    from fusco.core.errors import CompileError
    from fusco.cuda.kernels.compiler import Compiler, default_cache_dir
    from fusco.cuda.kernels.copy_segments import CopyArgs

    constants = {"ARGUMENT_BYTES": ctypes.sizeof(CopyArgs), "NUM_THREADS": 256}
    try:
        with tempfile.TemporaryDirectory() as folder:
            Compiler("sm_90", Path(folder)).compile("copy_segments", constants)
    except CompileError as error:
        return Finding(check, "optional", str(error), "a cuda-core that brings NVRTC: pip install 'cuda-core[cu13]'")
    return Finding(check, "ok", f"compiled by NVRTC when first used, kept in {default_cache_dir()}")


def _cuda_core() -> Finding:
    if has_cuda_core():
        return Finding("cuda.core (compiles CUDA kernels)", "ok", "installed")
    return Finding("cuda.core (compiles CUDA kernels)", "optional", "not installed", "pip install 'cuda-core[cu13]'")


def _nccl() -> Finding:
    import torch.distributed as dist

    if dist.is_nccl_available():
        return Finding(_NCCL, "ok", "in this torch")
    return Finding(_NCCL, "optional", "not in this torch", "a torch built for CUDA")

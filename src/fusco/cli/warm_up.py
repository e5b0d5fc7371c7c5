"""``fusco warm-up``: compile kernels before their first use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fusco.cli import options
from fusco.cli.running import new_console
from fusco.core.requirements import LEAST_CAPABILITY, check_cuda_core

if TYPE_CHECKING:
    from fusco.cuda.kernels.warm_up import KernelShape

_ARCHITECTURE = re.compile(r"sm_\d+[a-z]?")


def warm_up(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sm_NN,...",
            help="GPUs to compile for, such as sm_90 (H100, H200); several with commas. Default: this machine's.",
        ),
    ] = None,
    ranks_per_node: options.RanksPerNode = 8,
    hidden: options.Hidden = 7168,
    num_topk: options.NumTopk = 8,
    dtype: options.Dtype = "bfloat16",
) -> None:
    """Compile kernels and cache them on disk, for example while a container image is built.

    All CPU kernels are compiled. CUDA kernels are compiled for one shape (--ranks-per-node, --hidden, --num-topk,
    --dtype) and any number of tokens, those of dispatch and combine within a node; call it again for other shapes. It
    needs no GPU, only cuda-core.

    Kernels are cached in FUSCO_CACHE_DIR, by default ~/.cache/fusco. An image for several users sets it to a folder
    of root that all can read and no other user can write.

    In a Dockerfile: ENV FUSCO_CACHE_DIR=/opt/fusco and RUN fusco warm-up --arch sm_90
    """
    given = None if arch is None else options.choose_names(arch, [], "arch")
    for name in given or ():
        if not _ARCHITECTURE.fullmatch(name):
            raise ValueError(f"--arch {name!r} is not an architecture such as sm_90")
    import torch  # it takes seconds, and names are right now

    from fusco.cuda.kernels.warm_up import KernelShape

    architectures = _visible() if given is None else given
    if architectures:
        check_cuda_core()
        _check_supported(architectures)
    console = new_console()
    _warm_up_cpu(console)
    shape = KernelShape(num_ranks=ranks_per_node, num_topk=num_topk, hidden=hidden, dtype=getattr(torch, dtype))
    for name in architectures:
        _warm_up_cuda(name, shape, console)
    if not architectures:
        console.print("CUDA kernels: none, since torch finds no GPU and no --arch is given", highlight=False)


def _check_supported(architectures: Sequence[str]) -> None:
    from cuda.bindings import nvrtc

    _, of_nvrtc = nvrtc.nvrtcGetSupportedArchs()
    numbers = [number for number in of_nvrtc if divmod(number, 10) >= LEAST_CAPABILITY]
    for name in architectures:
        if int(name[3:].rstrip(ascii_lowercase)) not in numbers:
            known = ", ".join(f"sm_{number}" for number in numbers)
            raise ValueError(f"--arch {name!r} is none that fusco's kernels and this NVRTC have: {known}")


def _visible() -> list[str]:
    """Return the architectures of this machine's GPUs."""
    import torch

    devices = range(torch.cuda.device_count())
    return sorted({"sm_{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices})


def _warm_up_cpu(console: Console) -> None:
    from fusco.control.node_memory import warm_up_node_memory
    from fusco.control.record_round import warm_up_record_round
    from fusco.core.checked_ids import warm_up_checked_ids
    from fusco.core.compiled import cpu_cache_folder
    from fusco.cpu.kernels.warm_up import warm_up_cpu
    from fusco.cuda.repeated_calls import warm_up_repeated_calls
    from fusco.placement.placement import warm_up_placement
    from fusco.planner.balancer import warm_up_balancers
    from fusco.schedule import warm_up as warm_up_scheduler

    of_node = (warm_up_cpu, warm_up_node_memory, warm_up_record_round, warm_up_repeated_calls)
    planning = (warm_up_balancers, warm_up_scheduler, warm_up_placement)
    for compile_them in (*of_node, *planning, warm_up_checked_ids):
        compile_them()
    console.print(f"CPU kernels: {cpu_cache_folder().describe()}", highlight=False, soft_wrap=True)


def _warm_up_cuda(arch: str, shape: KernelShape, console: Console) -> None:
    from fusco.cuda.kernels.compiler import Compiler
    from fusco.cuda.kernels.warm_up import warm_up_cuda

    compiler = Compiler(arch)
    names = sorted(set(warm_up_cuda(compiler, shape)))
    kept = compiler.folder.describe()
    console.print(f"CUDA kernels for {arch}: {', '.join(names)}; {kept}", highlight=False, soft_wrap=True)

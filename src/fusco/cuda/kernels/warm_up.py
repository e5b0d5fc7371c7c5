"""Compile CUDA kernels before a GPU needs them, by the calls that would launch them, with dummy arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusco.core.placement import ExpertPlacement
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels import weight_gradients
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.compiler import Compiler
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.plan import PlanShape, PlanTables, PlanTensors, PlanTerms, PublishedRouting, plan_slots
from fusco.cuda.kernels.scatter_rows import ScatterTerms, scatter_rows


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """Shape that kernels are compiled for: ranks per node, experts per token (top-k), hidden size and dtype of rows.

    Ids are int64 and weights float32, as routers return them.
    """

    num_ranks: int
    num_topk: int
    hidden: int
    dtype: torch.dtype


class _NoKernel:
    """Kernel that is compiled and not loaded."""

    def launch(self, *_: object, **__: object) -> None:
        """Do nothing."""


class CompilingLibrary:
    """Library for an architecture instead of a device: kernels are compiled, cached, and never launched.

    Attributes:
        names: the names of all requested kernels.
    """

    device, num_sms, max_shared_bytes = torch.device("cpu"), 132, 227 << 10

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.names: list[str] = []

    def get(self, name: str, constants: Mapping[str, object]) -> _NoKernel:
        """Compile the kernel of this name and these compile-time constants."""
        self._compiler.compile(name, constants)
        self.names.append(name)
        return _NoKernel()


def warm_up_cuda(compiler: Compiler, shape: KernelShape) -> list[str]:
    """Compile the kernels of dispatch and combine within a node, forward and backward, unless they are cached.

    Returns the names of the kernels. Those of segments and between nodes, and of other shapes, are compiled when they
    are first used.
    Raises ``CompileError`` with the compiler's message.
    """
    library: Any = CompilingLibrary(compiler)
    launcher = Launcher(library, comm_type(shape.num_ranks)(), 0)
    weights = torch.zeros(1, shape.num_topk, dtype=torch.float32, device="cpu")
    rows = torch.zeros(1, shape.hidden, dtype=shape.dtype, device="cpu")
    planned = _planned(shape, weights)
    payload = Payload(address=0, row_bytes=rows.nbytes)
    _plan(launcher, planned, weights)
    terms = ScatterTerms(clears_padding=False, num_sms=None)
    scatter_rows(launcher, planned, planned.all_rows, [payload], [0] * shape.num_ranks, terms)
    for is_weighted in (True, False):  # of combine, and of dispatch's backward
        combine_rows(launcher, planned.all_rows, rows, shape.dtype, rows, is_weighted=is_weighted, num_sms=None)
    weight_gradients.launch(library, 0, rows, rows, weights[:, 0].contiguous())
    return list(library.names)


def _planned(shape: KernelShape, weights: torch.Tensor) -> DevicePlan:
    sizes = PlanShape(0, 0, shape.num_topk, num_local_experts=1, weight_dtype=weights.dtype)
    return DevicePlan(
        rank=0,
        placement=ExpertPlacement.contiguous(1, 1),
        first_row=(0,) * (shape.num_ranks + 1),
        held=(0,),
        num_topk=shape.num_topk,
        num_slots=0,
        tables=PlanTensors.of(sizes, torch.device("cpu")),
    )


def _plan(launcher: Launcher, planned: DevicePlan, weights: torch.Tensor) -> None:
    table = torch.zeros(1, dtype=torch.int32, device="cpu")
    tables = PlanTables(
        expert_to_local=table,
        expert_to_rank=table,
        publishers=tuple(range(launcher.num_ranks)),
        num_local_experts=1,
        run_counts=table,
        report=0,
        reported_counts=table,
    )
    ids = torch.zeros(1, planned.num_topk, dtype=torch.int64, device="cpu")
    terms = PlanTerms(expert_alignment=1, max_slots=1, is_overflow_reported=False, num_sms=None)
    plan_slots(launcher, tables, planned, [PublishedRouting(0, ids, weights)], terms, ticket=0)

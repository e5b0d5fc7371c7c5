"""Compile CUDA kernels before a GPU needs them, by the calls that would launch them, with dummy arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusco.core.placement import ExpertPlacement
from fusco.cuda.kernels import weight_gradients
from fusco.cuda.kernels.abi import Payload, RowsAt
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.compiler import Compiler
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.plan import PlanShape, PlanTables, PlanTensors, PlanTerms, PublishedRouting, plan_slots
from fusco.cuda.kernels.scatter_rows import OwnRouting, ScatterTerms, scatter_rows
from fusco.cuda.tuning import ROWS_OF_EACH_SHAPE, pushes_early
from fusco.cuda.within_node.device_plan import DevicePlan


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

    Returns the names of the kernels. Those of any number of rows are compiled; those of segments and between nodes, of
    other shapes, and of a budget of SMs, when they are first used.
    Raises ``CompileError`` with the compiler's message.
    """
    library: Any = CompilingLibrary(compiler)
    launcher = Launcher(library, comm_type(shape.num_ranks)(), 0)
    weights = torch.zeros(1, shape.num_topk, dtype=torch.float32, device="cpu")
    ids = torch.zeros(1, shape.num_topk, dtype=torch.int64, device="cpu")
    rows = torch.zeros(1, shape.hidden, dtype=shape.dtype, device="cpu")
    payload, at = Payload(address=0, row_bytes=rows.nbytes), RowsAt.of(rows)
    for num_rows in ROWS_OF_EACH_SHAPE:
        plan = DevicePlan(
            rank=0,
            placement=ExpertPlacement.contiguous(1, 1),
            first_row=tuple(num_rows * rank // shape.num_ranks for rank in range(shape.num_ranks + 1)),
            held=(0,),
            num_topk=shape.num_topk,
            num_slots=0,
            tables=PlanTensors.of(PlanShape(0, 0, shape.num_topk, 1, weights.dtype), torch.device("cpu")),
        )
        tables = _tables(launcher.num_ranks)
        _launch_plan(launcher, tables, plan, PublishedRouting(0, ids, weights))
        routing = OwnRouting(ids, tables.expert_to_rank) if pushes_early(num_rows) else None
        terms = ScatterTerms(clears_padding=False, num_sms=None, routing=routing)
        scatter_rows(launcher, plan, plan.all_rows, [payload], [0] * shape.num_ranks, terms)
        for is_weighted in (True, False):  # of combine, and of dispatch's backward
            combine_rows(launcher, plan.all_rows, at, shape.dtype, at, is_weighted=is_weighted, num_sms=None)
        # of dispatch_again and of combine's backward
        scatter_rows(launcher, plan, plan.all_rows, [payload], [0] * shape.num_ranks, terms._replace(routing=None))
    weight_gradients.launch(library, 0, rows, rows, weights[:, 0].contiguous())
    return list(library.names)


def _tables(num_ranks: int) -> PlanTables:
    table = torch.zeros(1, dtype=torch.int32, device="cpu")
    return PlanTables(
        expert_to_local=table,
        expert_to_rank=table,
        publishers=tuple(range(num_ranks)),
        num_local_experts=1,
        run_counts=table,
        report=0,
        reported_counts=table,
    )


def _launch_plan(launcher: Launcher, tables: PlanTables, plan: DevicePlan, published: PublishedRouting) -> None:
    terms = PlanTerms(expert_alignment=1, max_slots=1, is_overflow_reported=False, num_sms=None)
    plan_slots(launcher, tables, plan, [published], terms, ticket=0)

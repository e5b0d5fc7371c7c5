"""Compilation of all CPU kernels ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.quantization import QUANTIZED_DTYPES, Quantize
from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.core.topology import Topology
from fusco.cpu.kernels.add_quantized_rows import add_quantized_rows
from fusco.cpu.kernels.add_rows import add_rows
from fusco.cpu.kernels.attached_sums import Holders, add_returned_sums, fold_attached_sums, produce_attached_sums
from fusco.cpu.kernels.choose_owners import warm_up_owner_choice
from fusco.cpu.kernels.gather_rows import gather_parts, gather_rows
from fusco.cpu.kernels.plan_pairs import PlannedPairs, plan_pairs
from fusco.cpu.kernels.quantize_rows import quantize_rows
from fusco.cpu.kernels.scatter_slices import scatter_slices
from fusco.cpu.kernels.segment_memory import JoinedSegments, concatenate
from fusco.cpu.kernels.sum_rows import Chunks, Rings, Terms, cut_chunks, fold_sums, has_message, produce_sums
from fusco.cpu.kernels.swap_memory import swap_memory
from fusco.planner.dispatch_plan import NodeRouting, select_tokens
from fusco.planner.owners import OwnerTables, warm_up_owners
from fusco.planner.routing import INDEX_DTYPES


def warm_up_cpu(on_step: Callable[[int, int], object] | None = None) -> None:
    """Compile every kernel for every dtype, or load it from the disk cache (seconds once, then milliseconds).

    ``on_step`` is called with the numbers of steps that are done, and of all.
    """
    pairs, counts = _plan(), np.zeros(2, np.int64)
    rings = Rings(np.array([[counts.ctypes.data, counts[1:].ctypes.data, 0]]), 1, 1)
    chunks = cut_chunks(np.zeros((0, 4), np.int64), (0,), 1)
    steps: list[Callable[[], object]] = [
        _gather,
        warm_up_owners,
        *(partial(_select, dtype) for dtype in INDEX_DTYPES),
        partial(has_message, rings, 0),
        *(partial(_sum, dtype, pairs, chunks, rings) for dtype in ROW_DTYPES),
        partial(add_quantized_rows, 0, Quantize(), _NONE, torch.zeros(0, 0, dtype=torch.float32, device="cpu")),
        *(partial(_quantize, dtype) for dtype in QUANTIZED_DTYPES),
    ]
    for number, step in enumerate(steps, 1):
        step()
        if on_step:
            on_step(number, len(steps))


_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")


def _plan() -> PlannedPairs:
    no_routing = NodeRouting(torch.zeros(0, 1, dtype=torch.int32, device="cpu"), None, (0, 0))
    return plan_pairs(no_routing, ExpertPlacement.contiguous(1, 1), 0, (0,))


def _gather() -> None:
    memory = torch.zeros(0, dtype=torch.uint8, device="cpu")
    gather_rows(0, _NONE.numpy(), 1, memory)
    gather_parts(np.zeros((0, 2), np.int64), [_NONE])
    JoinedSegments([]).read(0, 0, 0)
    concatenate(np.zeros(0, np.int64), np.zeros(0, np.int64), memory)
    swap_memory(memory, memory, np.zeros(1, np.int64))
    nothing = np.zeros((0, 7), np.int64)
    scatter_slices(nothing, np.zeros(0, np.int64), _NONE, _NONE, nothing, 1, 1)


def _select(dtype: torch.dtype) -> None:
    warm_up_owner_choice(dtype, OwnerTables.of(ExpertPlacement.contiguous(1, 1), 0, Topology((0,))))
    select_tokens(torch.zeros(0, 1, dtype=dtype, device="cpu"), ExpertPlacement.contiguous(1, 1), Topology((0,)))


def _sum(dtype: torch.dtype, pairs: PlannedPairs, chunks: Chunks, rings: Rings) -> None:
    rows = torch.zeros(0, 1, dtype=dtype, device="cpu")
    sums = torch.zeros(0, 1, dtype=accumulation_dtype(dtype), device="cpu")
    terms = Terms.of(rows, None, pairs, 0)
    produce_sums(terms, chunks, rings)
    fold_sums(terms, 0, 0, rings, sums)
    add_rows(rows, _NONE, sums)
    holders = Holders(np.zeros((1, 1), np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64))
    produce_attached_sums(terms, holders)
    fold_attached_sums(terms, holders, sums)
    add_returned_sums(np.zeros((0, 3), np.int64), rows, sums)


def _quantize(dtype: torch.dtype) -> None:
    nothing = torch.zeros(0, 0, dtype=torch.uint8, device="cpu")
    quantize_rows(torch.zeros(0, 0, dtype=dtype, device="cpu"), Quantize(), nothing, nothing)

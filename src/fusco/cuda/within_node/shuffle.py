"""Dispatch and combine within a node: plan, scatter rows into their slots, and sum them, as kernels on one stream.

A call is a program, which is made for the first call of its shape: see ``programs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusco.core.current_stream import capture_number
from fusco.core.profile import Call
from fusco.core.recent import Recent
from fusco.core.rows import aligned, plain, row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import MemoryAt, RowsAt, Value
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.plan import PlanMemory
from fusco.cuda.kernels.program import TICKET
from fusco.cuda.kernels.spares import SpareLimit
from fusco.cuda.repeated_calls import RepeatedCalls
from fusco.cuda.tuning import pushes_early
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.own_rows import OwnRows
from fusco.cuda.within_node.planning import DevicePlanner, PlanSizes, affordable_bound_of
from fusco.cuda.within_node.programs import (
    DispatchProgram,
    Outputs,
    PlanProgram,
    new_outputs,
    rows_of_values,
    run_dispatch,
    shapes_of,
)
from fusco.engine.agreed_lanes import PublishedRows
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, Pending, RedispatchRequest
from fusco.planner.routing import Routing


class IntranodeShuffle:
    """Dispatch and combine of one rank where there is one node."""

    def __init__(
        self,
        context: CudaContext,
        planner: DevicePlanner,
        own_rows: OwnRows,
        repeated_calls: RepeatedCalls | None = None,
    ) -> None:
        self._context, self._planner, self._own_rows, self._repeated_calls = context, planner, own_rows, repeated_calls
        self._programs: Recent[tuple[Any, ...], Any] = Recent(max_size=256)
        self._spare_limit = SpareLimit()

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier plan into static rows."""
        return self._planner.pending_error()

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[DevicePlan]]:
        """Plan and move rows."""
        payloads = [aligned(payload) for payload in request.payloads]

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[DevicePlan]:
            output, program = self._dispatch(request, payloads, counts, stream, call)
            if self._repeated_calls:
                self._repeated_calls.keep_dispatch(request, program, counts)
            return output

        return Pending(PublishedRows(request.routing.num_tokens).pack(), run)

    def _dispatch(
        self,
        request: DispatchRequest,
        payloads: Sequence[torch.Tensor],
        counts: Sequence[tuple[int, ...]],
        stream: torch.cuda.Stream,
        call: Call,
    ) -> tuple[DispatchOutput[DevicePlan], DispatchProgram]:
        """Launch plan and rows; an exact size is read while rows move, if its bound is affordable."""
        weights, profile = request.routing.topk_weights, call.profile
        routing = Routing(request.routing.topk_idx.contiguous(), None if weights is None else plain(weights))
        with profile.spend("planning"):
            num_rows = [PublishedRows.unpack(of_rank).num_tokens for of_rank in counts]
            sizes = self._planner.sizes_of(routing, num_rows)
            program, outputs = self._program_and_outputs(request, payloads, routing, sizes, stream)
        routed, capture = (routing.topk_idx, routing.topk_weights, request.static), capture_number()
        # Memory that a graph writes to is its own; and a program that is new may never be run again.
        tables = program.new_tables() if program.has_run and not capture else self._planner.new_tables(sizes)
        plan = run_dispatch(program, outputs, payloads, routed, profile, tables, capture)
        return DispatchOutput(plan, outputs), program

    def _program_and_outputs(
        self,
        request: DispatchRequest,
        payloads: Sequence[torch.Tensor],
        routing: Routing,
        sizes: PlanSizes,
        stream: torch.cuda.Stream,
    ) -> tuple[DispatchProgram, list[torch.Tensor]]:
        """Return the program of a dispatch, and memory for its rows; none if that must wait for the plan."""
        static, row_sizes = request.static, list(map(row_bytes, payloads))
        num_ranks = len(sizes.first_row) - 1
        num_slots = (
            static.num_slots(sizes.shape.num_local_experts)
            if static
            else affordable_bound_of(sizes.shape, num_ranks, request, row_sizes)
        )
        outputs: list[torch.Tensor] = []
        rows_per_expert = static.rows_per_expert if static else None
        try:
            outputs = [] if num_slots is None else new_outputs(payloads, num_slots, rows_per_expert)
        except torch.cuda.OutOfMemoryError:  # nothing has been launched; there may be room for fewer
            if static:
                raise
            num_slots = None
        options = (request.expert_alignment, static, request.launch.num_sms, num_slots)
        key = ("dispatch", sizes, shapes_of(payloads), routing.topk_idx.element_size(), *options, *self._place(stream))
        program = self._programs.use(key)
        if program is None:
            program = self._programs[key] = self._make_dispatch(request, payloads, routing, sizes, num_slots, stream)
        return program, outputs

    def _make_dispatch(
        self,
        request: DispatchRequest,
        payloads: Sequence[torch.Tensor],
        routing: Routing,
        sizes: PlanSizes,
        num_slots: int | None,
        stream: torch.cuda.Stream,
    ) -> DispatchProgram:
        of, context = DispatchProgram, self._context
        first_output = of.FIRST_ROW + len(payloads)
        plan, ids = sizes.at(Value(of.TABLES)), MemoryAt(Value(of.IDS), routing.topk_idx.element_size())
        weights = MemoryAt(Value(of.WEIGHTS), sizes.shape.weight_bytes) if sizes.shape.weight_dtype else None
        is_early = pushes_early(sizes.first_row[-1])
        planning = self._planner.call(
            plan, request, [(ids, weights)], stream, TICKET, is_followed_early=is_early and num_slots is not None
        )
        rows = rows_of_values(payloads, of.FIRST_ROW, first_output, Value(of.NUM_SLOTS))
        early_ids, num_sms = ids if is_early and num_slots is not None else None, request.launch.num_sms
        scattering = self._own_rows.call(plan, plan.all_rows, rows, stream, num_sms, topk_idx=early_ids)
        steps = [(("plan", "slots"), planning), (("scatter", "own rows"), scattering)]
        together = [steps] if num_slots is not None else [steps[:1], steps[1:]]
        return DispatchProgram(
            self._planner,
            [context.program(each, first_output + len(payloads), stream) for each in together],
            PlanMemory(sizes.shape, context.arena.device, self._spare_limit),
            self._planner.fields_of(sizes, request.static, stream),
            num_slots,
            is_static=request.static is not None,
            outputs=Outputs(payloads, context.arena.device),
            num_sms=scattering.grid,
        )

    def redispatch(
        self, request: RedispatchRequest[DevicePlan], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""
        payloads, plan = list(map(aligned, request.payloads)), request.plan
        key = ("rows", *self._along(plan, payloads, request.launch.num_sms, stream))
        program = self._programs.use(key)
        if program is None:
            program = self._programs[key] = self._make_redispatch(request, payloads, stream)
        outputs = new_outputs(payloads, plan.num_slots, plan.rows_per_expert)
        program.run(outputs, payloads, plan)
        return self._made(program, request, request.payloads, outputs, call)

    def _make_redispatch(
        self, request: RedispatchRequest[DevicePlan], payloads: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> PlanProgram:
        of, num_sms = PlanProgram, request.launch.num_sms
        plan, first_output = request.plan.at(Value(of.TABLES)), of.FIRST_ROW + len(payloads)
        rows = rows_of_values(payloads, of.FIRST_ROW, first_output, Value(of.NUM_SLOTS))
        scattering = self._own_rows.call(plan, plan.all_rows, rows, stream, num_sms)
        steps = [(("scatter", "own rows"), scattering)]
        program = self._context.program(steps, first_output + len(payloads), stream)
        return PlanProgram(program, Outputs(payloads, self._context.arena.device), None, scattering.grid)

    def combine(self, request: CombineRequest[DevicePlan], call: Call, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Sum rows of each tensor."""
        rows, plan = list(map(aligned, request.rows)), request.plan
        key = ("sums", request.is_weighted, *self._along(plan, rows, request.launch.num_sms, stream))
        program = self._programs.use(key)
        if program is None:
            program = self._programs[key] = self._make_combine(request, rows, stream)
        outputs = new_outputs(rows, plan.num_tokens)
        program.run(outputs, rows, plan)
        return self._made(program, request, request.rows, outputs, call)

    def _make_combine(
        self, request: CombineRequest[DevicePlan], rows: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> PlanProgram:
        of, context, launcher = PlanProgram, self._context, self._context.launcher(stream)
        plan, first_output = request.plan.at(Value(of.TABLES)), of.FIRST_ROW + len(rows)
        steps = []
        for i, each in enumerate(rows):
            terms, wire_dtype = (each.dtype, each.shape[1]), context.wire_dtype(each.dtype)
            given, sums = RowsAt(Value(of.FIRST_ROW + i), *terms), RowsAt(Value(first_output + i), *terms)
            num_sms, is_weighted = request.launch.num_sms, request.is_weighted
            summing = combine_rows(
                launcher, plan.all_rows, given, wire_dtype, sums, is_weighted=is_weighted, num_sms=num_sms
            )
            steps.append((("sum", "tokens"), summing))
        program = context.program(steps, first_output + len(rows), stream)
        grid = max(summing.grid for _, summing in steps)
        return PlanProgram(program, Outputs(rows, context.arena.device), request.plan.num_tokens, grid)

    def _made(
        self,
        program: PlanProgram,
        request: RedispatchRequest[DevicePlan] | CombineRequest[DevicePlan],
        rows: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        call: Call,
    ) -> list[torch.Tensor]:
        """Return the outputs of a program that has run; count it, and keep it for calls with these rows."""
        program.count(call.profile)
        if self._repeated_calls:
            self._repeated_calls.keep_along_plan(request, program, rows)
        return outputs

    def _along(
        self, plan: DevicePlan, rows: Sequence[torch.Tensor], num_sms: int | None, stream: torch.cuda.Stream
    ) -> tuple[object, ...]:
        """Return what calls along plans depend on: another plan may differ in addresses and ``num_slots``."""
        return plan.first_row, plan.tables.shape, shapes_of(rows), num_sms, *self._place(stream)

    def _place(self, stream: torch.cuda.Stream) -> tuple[object, ...]:
        """Return what every program depends on: its stream, and whether its kernels are timed."""
        return stream.cuda_stream, self._context.is_timed, torch.is_inference_mode_enabled()

"""Dispatch and combine within a node: plan, scatter rows into their slots, and sum them, as kernels on one stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch

from fusco.core.profile import Call
from fusco.core.rows import aligned, plain
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.tuning import pushes_early
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.output_bound import affordable_bound_of
from fusco.cuda.within_node.own_rows import OwnRows, Planning, Transfer
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, LateRejection, Pending, RedispatchRequest
from fusco.engine.published_rows import PublishedRows

_Tensors = TypeVar("_Tensors", bound=Sequence[torch.Tensor])


class IntranodeShuffle:
    """Dispatch and combine of one rank where there is one node."""

    def __init__(self, context: CudaContext, planner: DevicePlanner, own_rows: OwnRows) -> None:
        self._context, self._planner, self._own_rows = context, planner, own_rows
        self.launched: list[PreparedLaunch] = []  # by the latest call

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier plan into static rows."""
        return self._planner.pending_error()

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[DevicePlan]]:
        """Plan and move rows."""
        payloads = [aligned(payload) for payload in request.payloads]

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[DevicePlan]:
            transfer = Transfer(payloads=payloads, launch=request.launch, stream=stream, call=call)
            return self._dispatch(request, [PublishedRows.unpack(of_rank).num_tokens for of_rank in counts], transfer)

        return Pending(PublishedRows(request.routing.num_tokens).pack(), run)

    def redispatch(
        self, request: RedispatchRequest[DevicePlan], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""
        payloads = list(map(aligned, request.payloads))
        transfer = Transfer(payloads=payloads, launch=request.launch, stream=stream, call=call)
        rows = self._own_rows.scatter(request.plan, request.plan.all_rows, transfer)
        self.launched = transfer.launched
        return rows

    def combine(self, request: CombineRequest[DevicePlan], call: Call, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Sum rows of each tensor."""
        plan, context, sums = request.plan, self._context, []
        launch = partial(combine_rows, is_weighted=request.is_weighted, num_sms=request.launch.num_sms)
        self.launched = []
        for rows in map(aligned, request.rows):
            sums.append(rows.new_empty(plan.num_tokens, rows.shape[1]))
            arguments = (context.launcher(stream), plan.all_rows, rows, context.wire_dtype(rows.dtype), sums[-1])
            self.launched.append(context.timeline.timed("sum", "tokens", stream, launch, *arguments))
            call.profile.count_sms(self.launched[-1].grid)
        return sums

    def _dispatch(
        self, request: DispatchRequest, num_rows: Sequence[int], transfer: Transfer
    ) -> DispatchOutput[DevicePlan]:
        """Launch plan and scatter; an exact size is read while rows move, if its bound is affordable."""
        routing, profile, own_rows, planner = request.routing, transfer.call.profile, self._own_rows, self._planner
        begin = perf_counter()
        weights = None if routing.topk_weights is None else plain(routing.topk_weights)
        published = [(routing.topk_idx.contiguous(), weights)]
        plan = planner.new_plan(DevicePlan, request, num_rows, transfer.stream)

        is_early = pushes_early(plan.first_row[-1])

        def launch_plan() -> None:
            launched = planner.launch(plan, request, published, transfer.stream, is_followed_early=is_early)
            transfer.launched.append(launched)

        planning, planned = Planning(launch_plan, published[0][0] if is_early else None), perf_counter()
        profile.planning_s += planned - begin
        rows = None
        if request.static:
            rows = own_rows.scatter(plan, plan.all_rows, transfer, planning=planning)
        elif (bound := affordable_bound_of(plan, request, transfer.row_bytes)) is not None:
            with suppress(torch.cuda.OutOfMemoryError):  # then nothing has been launched; there may be room for fewer
                rows = own_rows.scatter(plan, plan.all_rows, transfer, bound, planning)
        if rows is None:
            launch_plan()
        profile.wire_s += perf_counter() - planned
        if not request.static:
            rows = self._size_exactly(plan, rows, transfer)
        if not request.static and (rejection := planner.rejection_of(routing.topk_idx) or self.pending_error()):
            raise LateRejection(rejection)
        assert rows is not None
        self.launched = transfer.launched
        return DispatchOutput(plan, rows)

    def _size_exactly(
        self, plan: DevicePlan, rows: list[torch.Tensor] | None, transfer: Transfer
    ) -> list[torch.Tensor]:
        """Wait for the size of the plan; return ``rows``, narrowed, or scatter them now."""
        begin = perf_counter()
        self._planner.size_exactly(plan)
        transfer.call.profile.planning_s += perf_counter() - begin
        if rows is None:
            with transfer.call.profile.spend("wire"):
                return self._own_rows.scatter(plan, plan.all_rows, transfer)
        return narrowed(rows, plan.num_slots)


def narrowed(outputs: _Tensors, num_rows: int) -> _Tensors:
    """Return tensors that may be larger than needed, with this number of rows.

    They are changed in place: a view would be one of a larger tensor, which autograd treats differently.
    """
    for output in outputs:
        if output.shape[0] != num_rows:
            output.resize_(num_rows, *output.shape[1:])
    return outputs

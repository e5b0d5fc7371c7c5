"""Repeated calls: of inputs that are known, by programs that have run, after a record that is as it was before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusco.control.node_memory import NodeMemory
from fusco.control.repeated_record import Condition, RepeatedRecord, warm_up_repeated_record
from fusco.core.config import Launch, StaticRows
from fusco.core.profile import CallProfile
from fusco.core.rows import is_plain
from fusco.core.timeline import NO_TIMELINE
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.comm import Failure, Report
from fusco.cuda.kernels.program import warm_up_programs
from fusco.cuda.stream_order import StreamOrder
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.programs import CallProgram, DispatchProgram, PlanProgram, Routed
from fusco.engine.base import CombineRequest, DispatchRequest, RedispatchRequest, Request

_OWN_TYPES = (torch.Tensor, torch.nn.Parameter)  # whose ``new_empty`` makes a ``Tensor``
_ALIGNMENT = 16  # of rows, in bytes; others are copied first, as in ``fusco.core.rows.aligned``
_LOW_HALF = 0xFFFFFFFF


def warm_up_repeated_calls() -> None:
    """Compile what agrees with all ranks and what launches, or read it from the disk cache."""
    warm_up_repeated_record()
    warm_up_programs()


def _nothing_is_wrong(context: CudaContext) -> list[Condition]:
    """Return that no plan has found an invalid id or an overflow, and that no wait of the device has ended early."""
    report, failure, abort = context.arena.report_address, *context.arena.failure_addresses
    assert Failure.is_set.offset == 0
    return [
        Condition(report + Report.bad_static.offset, _LOW_HALF, _LOW_HALF),
        Condition(report + Report.overflow_needed.offset, _LOW_HALF, 0),
        Condition(failure, _LOW_HALF, 0),
        Condition(abort, _LOW_HALF, 0),
    ]


@dataclass(frozen=True)
class RepeatedCalls:
    """Keeps programs with inputs that are known, so that equal calls agree by one compiled function and run them."""

    context: CudaContext
    order: StreamOrder
    memory: NodeMemory
    descriptors: Mapping[int, int] | None = None  # of the connections to counterparts on other nodes
    overflows: Sequence[int] = ()  # addresses of int64 that are zero unless a message of fixed size was too small

    def keep_dispatch(
        self, request: DispatchRequest, program: DispatchProgram, counts: Sequence[Sequence[int]]
    ) -> None:
        """Keep the program of a dispatch that has been launched, with the counts of all ranks, if it has run before."""
        routing, launch = request.routing, request.launch
        tensors = [*request.payloads, routing.topk_idx]
        tensors += [] if routing.topk_weights is None else [routing.topk_weights]
        # Otherwise the weights that travel are a copy.
        are_sent = request.topk_weights is None or request.topk_weights.dtype == tensors[-1].dtype
        if self._has_run(program) and are_sent and not request.with_weights and self._can_repeat(launch, tensors):
            self._keep(request, program, lambda record: RepeatedDispatch(self, record, program, request), counts)

    def keep_along_plan(
        self, request: RedispatchRequest[Any] | CombineRequest[Any], program: PlanProgram, rows: Sequence[torch.Tensor]
    ) -> None:
        """Keep the program of a call along a plan that has been launched, if it has run before."""
        if self._has_run(program) and self._can_repeat(request.launch, rows):
            counts: list[tuple[int, ...]] = [()] * self.context.topology.world_size
            self._keep(request, program, lambda record: RepeatedAlongPlan(self, record, program, request), counts)

    def _keep(
        self,
        request: Request,
        program: CallProgram,
        make: Callable[[RepeatedRecord], Repeated],
        counts: Sequence[Sequence[int]],
    ) -> None:
        known, kept = request.known, program.repeated
        if known is None:
            return
        if kept is None or kept[0] != known.fingerprint:
            record = RepeatedRecord(self.memory, known.fingerprint, counts, self._conditions(), self.descriptors)
            program.repeated = kept = known.fingerprint, make(record)
        known.repeated = kept[1]

    def _has_run(self, program: CallProgram) -> bool:
        """Return whether a program has run before now; note that it has."""
        has_run, program.has_run = program.has_run, True
        return has_run

    def _can_repeat(self, launch: Launch, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call with these tensors, whose values and addresses may change, is all in its program."""
        order = self.order
        if launch.own_stream or launch.event or order.latest is None:
            return False
        # Outputs of repeated calls are of no subclass.
        are_plain = all(type(each) in _OWN_TYPES and is_plain(each.detach()) for each in tensors)
        return are_plain and order.goes_on(order.latest) and not self.context.is_timed

    def _conditions(self) -> list[Condition]:
        """Return that no earlier call has an error to raise, which a repeated one would pass over."""
        return [*_nothing_is_wrong(self.context), *(Condition(address, -1, 0) for address in self.overflows)]


class Repeated:
    """A program for calls that are equal but for values and addresses.

    Attributes:
        record: to agree with all ranks.
        run: that of the program.
    """

    def __init__(
        self, calls: RepeatedCalls, record: RepeatedRecord, program: DispatchProgram | PlanProgram, launch: Launch
    ) -> None:
        assert calls.order.latest is not None
        self._context, self._order, self._stream = calls.context, calls.order, calls.order.latest
        self._launch, self.record, self._has_all_sms = launch, record, not launch.num_sms
        self._program: Any = program
        self.run: Callable[..., Any] = program.run

    def count(self, profile: CallProfile) -> None:
        """Count what a call takes and sends."""
        self._program.count(profile)
        profile.internode_metadata_bytes += self.record.internode_bytes

    def _fits(self, launch: Launch | None) -> bool:
        """Return whether a call with these launch options, now, is the same."""
        return (
            (self._has_all_sms if launch is None else type(launch) is Launch and self._launch == launch)
            and self._order.goes_on(self._stream)
            and self._context.timeline is NO_TIMELINE
        )


class RepeatedDispatch(Repeated):
    """Dispatch of an input whose values and addresses alone differ from an earlier one."""

    def __init__(
        self, calls: RepeatedCalls, record: RepeatedRecord, program: DispatchProgram, request: DispatchRequest
    ) -> None:
        super().__init__(calls, record, program, request.launch)
        self._static, self.finish = request.static, program.finish

    def outputs(
        self, payloads: Sequence[torch.Tensor], routed: Routed, launch: Launch | None
    ) -> list[torch.Tensor] | None:
        """Return memory for the rows; ``None`` if the call is another one, or there is none."""
        static = routed[-1]
        is_same = static is self._static or (type(static) is StaticRows and static == self._static)
        if not (is_same and self._fits(launch)):
            return None
        if static and torch.are_deterministic_algorithms_enabled():
            return None  # PyTorch fills new memory then, and the program's outputs are not filled
        for payload in payloads:
            if payload.data_ptr() % _ALIGNMENT:
                return None
        try:
            outputs: list[torch.Tensor] | None = self._program.outputs()
        except RuntimeError:  # of PyTorch; running out of memory is one
            return None
        return outputs


class RepeatedAlongPlan(Repeated):
    """Call along a plan: of rows whose number, values and addresses alone differ from earlier ones."""

    def __init__(
        self,
        calls: RepeatedCalls,
        record: RepeatedRecord,
        program: PlanProgram,
        request: RedispatchRequest[Any] | CombineRequest[Any],
    ) -> None:
        super().__init__(calls, record, program, request.launch)
        plan = request.plan
        self._of_plan = plan.first_row, plan.tables.shape, self._stream.cuda_stream

    def outputs(
        self, rows: Sequence[torch.Tensor], plan: DevicePlan, launch: Launch | None
    ) -> list[torch.Tensor] | None:
        """Return memory for the results; ``None`` if the call is another one, or there is none."""
        if (plan.first_row, plan.tables.shape, plan.stream) != self._of_plan:
            return None
        for each in rows:
            # Strides of at most one row say nothing: rows with the same strides may have been contiguous before.
            if each.data_ptr() % _ALIGNMENT or not each.is_contiguous():
                return None
        if not self._fits(launch):
            return None
        program = self._program
        if program.num_rows is None and plan.reported_counts is None and torch.are_deterministic_algorithms_enabled():
            return None  # see ``RepeatedDispatch``
        try:
            outputs: list[torch.Tensor] | None = program.outputs(plan)
        except RuntimeError:  # as above
            return None
        return outputs

"""Calls within a node that have been made before: one compiled function agrees with all ranks, another launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.node_memory import NodeMemory
from fusco.control.repeated_record import Condition, RepeatedRecord, warm_up_repeated_record
from fusco.core.config import Launch, StaticRows
from fusco.core.profile import CallProfile
from fusco.core.rows import allocator_of, expert_rows_shape, is_plain, row_bytes
from fusco.core.timeline import NO_TIMELINE
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.combine_rows import combine_fields
from fusco.cuda.kernels.comm import Failure, Report
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.kernels.plan import PlanMemory, plan_fields
from fusco.cuda.kernels.repeated_launches import Field, RepeatedLaunches, warm_up_repeated_launches
from fusco.cuda.kernels.scatter_rows import scatter_fields
from fusco.cuda.kernels.spares import SpareLimit
from fusco.cuda.stream_order import StreamOrder
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.output_bound import affordable_bound_of
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.cuda.within_node.shuffle import narrowed
from fusco.engine.base import CombineRequest, DispatchRequest, KnownCall, LateRejection, RedispatchRequest

_Memory = TypeVar("_Memory")
# Ids and weights of a dispatch, and its static rows.
Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, StaticRows | None]

_OWN_TYPES = (torch.Tensor, torch.nn.Parameter)  # whose ``new_empty`` makes a ``Tensor``
_ALIGNMENT = 16  # of rows, in bytes; others are copied first, as in ``fusco.core.rows.aligned``
_LOW_HALF = 0xFFFFFFFF
_address_of = torch.Tensor.data_ptr


def warm_up_repeated_calls() -> None:
    """Compile both functions, or read them from the disk cache."""
    warm_up_repeated_record()
    warm_up_repeated_launches()


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
    """Makes calls that can be repeated, of those that have just been made."""

    context: CudaContext
    planner: DevicePlanner
    order: StreamOrder
    memory: NodeMemory
    shuffle: Any  # has launched the kernels of the latest call, within a node or between nodes
    descriptors: Mapping[int, int] | None = None  # of the connections to counterparts on other nodes
    spare_limit: SpareLimit = field(default_factory=SpareLimit, init=False)  # of plans for later calls

    def keep_dispatch(self, request: DispatchRequest, plan: DevicePlan) -> None:
        """Prepare a dispatch that has just been launched, if an earlier one was the same."""
        circumstances = (plan.first_row, plan.stream, request.static, request.launch)
        launched = self.shuffle.launched
        is_whole = is_second(request.known, circumstances) and len(launched) == 2
        if request.known and is_whole and self.can_repeat_dispatch(request, plan):
            num_slots = self.num_slots_of(request, plan)
            request.known.repeated = RepeatedDispatch(self, request, plan, launched, num_slots)

    def keep_redispatch(self, request: RedispatchRequest[DevicePlan]) -> None:
        """Prepare a dispatch along a plan that has just been launched, if an earlier one was the same."""
        if self._is_second_of_plan(request, request.payloads):
            request.known.repeated = RepeatedRedispatch(self, request, self.shuffle.launched)  # type: ignore[union-attr]

    def keep_combine(self, request: CombineRequest[DevicePlan]) -> None:
        """Prepare a combine that has just been launched, if an earlier one was the same."""
        if self._is_second_of_plan(request, request.rows):
            request.known.repeated = RepeatedCombine(self, request, self.shuffle.launched)  # type: ignore[union-attr]

    def _is_second_of_plan(
        self, request: CombineRequest[DevicePlan] | RedispatchRequest[DevicePlan], rows: Sequence[torch.Tensor]
    ) -> bool:
        circumstances = (*of_plan(request.plan), request.launch)
        return is_second(request.known, circumstances) and self.can_repeat(request.launch, request.plan, rows)

    def can_repeat_dispatch(self, request: DispatchRequest, plan: DevicePlan) -> bool:
        """Return whether a dispatch can be made again as it was launched."""
        routing = request.routing
        tensors = [*request.payloads, routing.topk_idx]
        tensors += [] if routing.topk_weights is None else [routing.topk_weights]
        if not self.can_repeat(request.launch, plan, tensors) or request.with_weights:
            return False
        # Otherwise the weights that travel are a copy.
        return request.topk_weights is None or request.topk_weights.dtype == tensors[-1].dtype

    def num_slots_of(self, request: DispatchRequest, plan: DevicePlan) -> int | None:
        """Return the rows of a dispatch's output before it is narrowed; ``None`` if they depend on the plan."""
        if request.static:
            return plan.num_slots
        return affordable_bound_of(plan, request, tuple(map(row_bytes, request.payloads)))

    def can_repeat(self, launch: Launch, plan: DevicePlan, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call with these tensors was made in circumstances that prepared ones know."""
        order = self.order
        if launch.own_stream or launch.event or order.latest is None or order.latest.cuda_stream != plan.stream:
            return False
        # Outputs of repeated calls are of no subclass.
        are_plain = all(type(each) in _OWN_TYPES and is_plain(each.detach()) for each in tensors)
        return are_plain and order.goes_on(order.latest) and self.context.timeline is NO_TIMELINE

    def record(self, fingerprint: CollectiveFingerprint, counts: Sequence[Sequence[int]]) -> RepeatedRecord:
        """Return the record of a call with these counts of all ranks."""
        return RepeatedRecord(self.memory, fingerprint, counts, self.conditions(), self.descriptors)

    def conditions(self) -> list[Condition]:
        """Return that no earlier call has an error to raise, which a repeated one would pass over."""
        return _nothing_is_wrong(self.context)


def is_second(known: KnownCall | None, circumstances: object) -> TypeGuard[KnownCall]:
    """Return whether the latest call before this one had the same input and circumstances; note them."""
    if known is None:
        return False
    before, known.circumstances = known.circumstances, circumstances
    return before == circumstances


def of_plan(plan: DevicePlan) -> tuple[object, ...]:
    """Return what a prepared call along a plan depends on: another plan may differ in addresses and ``num_slots``."""
    return plan.first_row, plan.tables.shape, plan.stream


def or_none(allocate: Callable[..., _Memory], *sizes: Any) -> _Memory | None:
    """Return new memory, or ``None`` if there is none: then the call is not repeated, and fails on all ranks."""
    try:
        return allocate(*sizes)
    except RuntimeError:  # of PyTorch; running out of memory is one
        return None


class Repeated:
    """Base of repeated calls.

    Attributes:
        record: to agree with all ranks.
    """

    def __init__(self, calls: RepeatedCalls, launch: Launch, record: RepeatedRecord, num_sms: int) -> None:
        assert calls.order.latest is not None
        self._context, self._order, self._stream = calls.context, calls.order, calls.order.latest
        self._is_inference = torch.is_inference_mode_enabled()
        self._launch, self.record, self._num_sms = launch, record, num_sms
        self._allocate = allocator_of(calls.context.arena.device)
        self._rows: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []  # shape, strides, dtype

    def _fits(self, launch: Launch | None) -> bool:
        """Return whether a call with these launch options, now, is the same."""
        return (
            (not self._launch.num_sms if launch is None else type(launch) is Launch and self._launch == launch)
            and self._order.goes_on(self._stream)
            and self._context.timeline is NO_TIMELINE
            and torch.is_inference_mode_enabled() is self._is_inference
        )

    def count(self, profile: CallProfile) -> None:
        """Set what the profile of a call has, but for times."""
        profile.num_sms = self._num_sms

    def _keep_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Keep what the rows of each input and its output have in common."""
        for rows in inputs:
            strides = rows.new_empty((1, *rows.shape[1:]), device="meta").stride()
            self._rows.append((tuple(rows.shape[1:]), strides, rows.dtype))

    def _arguments_of(self, num_rows: int, rows_per_expert: int | None = None) -> list[Any]:
        """Return shape, strides and dtype of each output with this number of rows, of each expert if it is given."""
        if rows_per_expert is None:
            return [((num_rows, *shape), strides, dtype) for shape, strides, dtype in self._rows]
        first = expert_rows_shape(num_rows, rows_per_expert)
        return [
            ((*first, *shape), (strides[0] * rows_per_expert, *strides), dtype) for shape, strides, dtype in self._rows
        ]

    def _new_outputs(self, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        try:
            return list(starmap(self._allocate, arguments))
        except RuntimeError:  # of PyTorch; running out of memory is one. Then the call is not repeated
            return None


class RepeatedDispatch(Repeated):
    """Dispatch of an input whose values and addresses alone differ from an earlier one."""

    def __init__(
        self,
        calls: RepeatedCalls,
        request: DispatchRequest,
        plan: DevicePlan,
        launched: Sequence[PreparedLaunch],
        num_slots: int | None,
    ) -> None:
        """Prepare the dispatch that has just made a plan.

        Its output has ``num_slots`` rows before it is narrowed; with ``None`` it is made once the size is known.
        """
        assert request.known is not None
        counts = [(plan.num_rows_of(src),) for src in range(len(plan.first_row) - 1)]
        record = calls.record(request.known.fingerprint, counts)
        super().__init__(calls, request.launch, record, launched[1].grid)
        self._keep(calls, request, plan, num_slots)
        shape = plan.tables.shape
        # Indices of values, after the ticket.
        memory, num, ids, weights, first = range(1, 6)
        rows = range(first, first + len(request.payloads))
        outputs = range(rows.stop, rows.stop + len(rows))
        moved = [Field("rows", value, entry=payload) for payload, value in enumerate(rows)]
        moved.append(Field("topk_idx", ids))  # for rows that are pushed while the plan is made
        fields = [plan_fields(shape, memory, ids, weights), moved + scatter_fields(shape, memory, outputs, num)]
        launches, report = list(zip(launched, fields, strict=True)), calls.context.arena.report_address
        together = [launches] if num_slots is not None else [launches[:1], launches[1:]]
        self._launches = [RepeatedLaunches(each, outputs.stop, plan.stream, report) for each in together]

    def _keep(self, calls: RepeatedCalls, request: DispatchRequest, plan: DevicePlan, num_slots: int | None) -> None:
        """Keep what later calls have in common with this one."""
        self._planner, self._static, self._num_slots = calls.planner, request.static, num_slots
        self._keep_rows(request.payloads)
        self._outputs = self._arguments_of(num_slots or 0, plan.rows_per_expert)
        self._memory = PlanMemory(plan.tables.shape, calls.context.arena.device, calls.spare_limit)
        same = ("rank", "placement", "first_row", "held", "num_topk", "rows_per_expert", "stream")
        self._of_plan: dict[str, Any] = {name: getattr(plan, name) for name in same}

    def outputs(
        self,
        payloads: Sequence[torch.Tensor],
        routed: Routed,
        launch: Launch | None,
    ) -> list[torch.Tensor] | None:
        """Return memory for the rows; ``None`` if the call is another one, or there is none."""
        static = routed[-1]
        is_same = static is self._static or (type(static) is StaticRows and static == self._static)
        if not (is_same and self._fits(launch)):
            return None
        if static and torch.are_deterministic_algorithms_enabled():
            return None  # PyTorch fills new memory then, and ``_allocate`` does not
        for payload in payloads:
            if payload.data_ptr() % _ALIGNMENT:
                return None
        return [] if self._num_slots is None else self._new_outputs(self._outputs)

    def run(
        self,
        outputs: list[torch.Tensor],
        payloads: Sequence[torch.Tensor],
        routed: Routed,
    ) -> DevicePlan:
        """Launch it, once all ranks agree, into these outputs, and return the plan; ``finish`` must follow.

        If the outputs depend on the plan, wait for its size and add them to the list.
        """
        ticket, tables, (topk_idx, topk_weights, _) = self._planner.next_ticket(), self._memory.take(), routed
        inputs = (topk_idx.data_ptr(), 0 if topk_weights is None else topk_weights.data_ptr())
        rows = list(map(_address_of, payloads))
        places = list(map(_address_of, outputs)) or rows  # no outputs yet: the plan uses no rows
        num_slots = self._num_slots or 0
        self._launches[0].launch(0 if self._static else ticket, tables.address, num_slots, *inputs, *rows, *places)
        plan = DevicePlan(num_slots=num_slots, tables=tables, **self._of_plan)
        if self._num_slots is None:
            self._wait_for_size(plan)
            outputs += starmap(self._allocate, self._arguments_of(plan.num_slots))
            places = list(map(_address_of, outputs))
            self._launches[1].launch(0, tables.address, plan.num_slots, *inputs, *rows, *places)
        return plan

    def finish(self, plan: DevicePlan, outputs: Sequence[torch.Tensor], topk_idx: torch.Tensor) -> None:
        """Wait for the size of the outputs unless they are static, and narrow them; ``LateRejection`` of an invalid id.

        What does not depend on the size should be done before: after the launch, and while the device works.
        """
        self._memory.refill()
        if self._static:
            return
        outcome = self._wait_for_size(plan)
        if plan.num_slots != self._num_slots:
            narrowed(outputs, plan.num_slots)
        if outcome < 0 and (rejection := self._planner.rejection_of(topk_idx) or self._planner.pending_error()):
            raise LateRejection(rejection)

    def _wait_for_size(self, plan: DevicePlan) -> int:
        """Wait for the latest plan, and return the outcome of its launch."""
        outcome = self._launches[0].wait(self._planner.ticket)
        if outcome < 0:
            self._planner.size_exactly(plan)
        else:
            self._planner.sized(plan, outcome)
        return outcome


class RepeatedOfPlan(Repeated):
    """Base of calls along a plan: of rows whose number, values and addresses alone differ from earlier ones."""

    _launches: RepeatedLaunches

    def __init__(
        self,
        calls: RepeatedCalls,
        request: RedispatchRequest[Any] | CombineRequest[Any],
        launched: Sequence[PreparedLaunch],
    ) -> None:
        """Keep what later calls have in common with the launched one."""
        assert request.known is not None
        record = calls.record(request.known.fingerprint, [()] * calls.context.topology.world_size)
        super().__init__(calls, request.launch, record, max(each.grid for each in launched))
        self._of_plan = of_plan(request.plan)
        self._outputs: list[Any] = []  # arguments of outputs; none if they have the slots of the plan

    def _is_along(self, plan: DevicePlan, rows: Sequence[torch.Tensor], launch: Launch | None) -> bool:
        """Return whether a call along a plan, now, is the same."""
        if (plan.first_row, plan.tables.shape, plan.stream) != self._of_plan:  # as ``of_plan``, without a call
            return False
        for each in rows:
            # Strides of at most one row say nothing: rows with the same strides may have been contiguous before.
            if each.data_ptr() % _ALIGNMENT or not each.is_contiguous():
                return False
        return self._fits(launch)

    def outputs(
        self, rows: Sequence[torch.Tensor], plan: DevicePlan, launch: Launch | None
    ) -> list[torch.Tensor] | None:
        """Return memory for the results; ``None`` if the call is another one, or there is none."""
        if not self._is_along(plan, rows, launch):
            return None
        arguments = self._outputs
        if not arguments:
            if plan.reported_counts is None and torch.are_deterministic_algorithms_enabled():
                return None  # see ``RepeatedDispatch``
            arguments = self._arguments_of(plan.num_slots, plan.rows_per_expert)
        return self._new_outputs(arguments)

    def run(self, outputs: list[torch.Tensor], rows: Sequence[torch.Tensor], plan: DevicePlan) -> None:
        """Launch it, once all ranks agree."""
        addresses = (*map(_address_of, rows), *map(_address_of, outputs))
        self._launches.launch(0, plan.tables.address, plan.num_slots, *addresses)


def _indices_of(num_inputs: int) -> tuple[int, int, range, range]:
    """Return the indices of the values of ``RepeatedOfPlan.run``: memory of the plan, its slots, rows, outputs."""
    return 1, 2, range(3, 3 + num_inputs), range(3 + num_inputs, 3 + 2 * num_inputs)


class RepeatedRedispatch(RepeatedOfPlan):
    """Dispatch along a plan."""

    def __init__(
        self, calls: RepeatedCalls, request: RedispatchRequest[DevicePlan], launched: Sequence[PreparedLaunch]
    ) -> None:
        """Prepare the dispatch that has just been launched."""
        plan, payloads = request.plan, request.payloads
        super().__init__(calls, request, launched)
        self._keep_rows(payloads)
        memory, num_slots, rows, outputs = _indices_of(len(payloads))
        fields = [Field("rows", row, entry=payload) for payload, row in enumerate(rows)]
        fields += scatter_fields(plan.tables.shape, memory, outputs, num_slots)
        num_values = 3 + 2 * len(payloads)
        self._launches = RepeatedLaunches([(launched[0], fields)], num_values, plan.stream, 0)


class RepeatedCombine(RepeatedOfPlan):
    """Combine of one tensor or several."""

    def __init__(
        self, calls: RepeatedCalls, request: CombineRequest[DevicePlan], launched: Sequence[PreparedLaunch]
    ) -> None:
        """Prepare the combine that has just been launched."""
        plan, is_weighted = request.plan, request.is_weighted
        super().__init__(calls, request, launched)
        self._keep_rows(request.rows)
        self._outputs = self._arguments_of(plan.num_tokens)
        memory, _, *indices = _indices_of(len(request.rows))
        launches = [
            (each, [Field("out", out), *combine_fields(plan.tables.shape, memory, row, is_weighted=is_weighted)])
            for each, row, out in zip(launched, *indices, strict=True)
        ]
        self._launches = RepeatedLaunches(launches, 3 + 2 * len(launched), plan.stream, 0)

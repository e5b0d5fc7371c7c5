"""Programs of a node: made for the first call of a shape, and run with the addresses of each call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any, TypeAlias

import torch

from fusco.core.config import StaticRows
from fusco.core.profile import CallProfile
from fusco.core.rows import allocator_of, expert_rows_shape, row_bytes
from fusco.cuda.kernels.abi import Payload, Value
from fusco.cuda.kernels.plan import PlanMemory, PlanTensors
from fusco.cuda.kernels.program import Program
from fusco.cuda.within_node.device_plan import CommonFields, DevicePlan
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.engine.base import LateRejection

# Ids and weights of a dispatch, and its static rows.
Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, StaticRows | None]

address_of = torch.Tensor.data_ptr


class Outputs:
    """Allocates rows of the same shapes, strides and dtypes as those of inputs, of no subclass."""

    def __init__(self, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        self._allocate = allocator_of(device)
        self._shape: tuple[int, int | None] = (-1, None)
        self._arguments: list[Any] = []  # for the latest number of rows
        self._rows = [
            (tuple(rows.shape[1:]), rows.new_empty((1, *rows.shape[1:]), device="meta").stride(), rows.dtype)
            for rows in inputs
        ]

    def new(self, num_rows: int, rows_per_expert: int | None = None) -> list[torch.Tensor]:
        """Return memory for ``num_rows`` rows of each; ``RuntimeError`` of PyTorch if there is none.

        ``rows_per_expert`` is that of the plan.
        """
        if (num_rows, rows_per_expert) != self._shape:
            self._shape, first = (num_rows, rows_per_expert), expert_rows_shape(num_rows, rows_per_expert)
            of_experts = [rows_per_expert] if rows_per_expert else []
            self._arguments = [
                ((*first, *shape), (*(strides[0] * each for each in of_experts), *strides), dtype)
                for shape, strides, dtype in self._rows
            ]
        return list(starmap(self._allocate, self._arguments))


class CallProgram:
    """Program of calls of one shape on one stream.

    Attributes:
        num_sms: the number of SMs that it takes.
        repeated: what repeats its calls, and of which fingerprint; see ``RepeatedCalls``.
        has_run: true after the first call.
    """

    def __init__(self, outputs: Outputs, num_sms: int) -> None:
        self._outputs, self.num_sms = outputs, num_sms
        self.repeated: Any = None
        self.has_run = False

    def count(self, profile: CallProfile) -> None:
        """Count what a call takes and sends."""
        profile.count_sms(self.num_sms)


class DispatchProgram(CallProgram):
    """Dispatch of rows of one shape, with the same numbers of tokens on all ranks: the plan, and the rows along it.

    ``num_slots`` are the rows of its output before it is narrowed to those of the plan; with ``None`` the output is
    made once the plan has told its size, and ``programs`` are two.
    """

    # Indices of values, after the ticket: plan, slots, ids, weights; then rows, and outputs.
    TABLES, NUM_SLOTS, IDS, WEIGHTS, FIRST_ROW = range(1, 6)

    def __init__(
        self,
        planner: DevicePlanner,
        programs: Sequence[Program],
        memory: PlanMemory,
        of_plan: CommonFields,
        num_slots: int | None,
        *,
        is_static: bool,
        outputs: Outputs,
        num_sms: int,
    ) -> None:
        super().__init__(outputs, num_sms)
        self._planner, self._programs, self._memory, self._of_plan = planner, programs, memory, of_plan
        self.num_slots, self.is_static = num_slots, is_static
        self.new_tables = memory.take  # memory for a plan, mostly one of several made together

    def outputs(self) -> list[torch.Tensor] | None:
        """Return memory for the rows, none if that depends on the plan; ``RuntimeError`` if there is not enough."""
        return [] if self.num_slots is None else self._outputs.new(self.num_slots, self._of_plan.rows_per_expert)

    def run(self, outputs: list[torch.Tensor], payloads: Sequence[torch.Tensor], routed: Routed) -> DevicePlan:
        """Launch it, once all ranks agree, into these outputs, and return the plan; ``finish`` must follow.

        If the outputs depend on the plan, wait for its size and add them to the list.
        """
        plan = self.launch(outputs, payloads, routed, self.new_tables())
        if self.num_slots is None:
            self.wait_for_size(plan)
            outputs += self._outputs.new(plan.num_slots)
            self.launch_rows(plan, outputs, payloads, routed)
        return plan

    def launch(
        self,
        outputs: Sequence[torch.Tensor],
        payloads: Sequence[torch.Tensor],
        routed: Routed,
        tables: PlanTensors,
        capture: int = 0,
    ) -> DevicePlan:
        """Launch the plan, and rows if there are outputs; return the plan."""
        ticket, (topk_idx, weights, _), num_slots = self._planner.next_ticket(), routed, self.num_slots or 0
        inputs = topk_idx.data_ptr(), 0 if weights is None else weights.data_ptr()
        # Without outputs yet, the plan uses no rows.
        rows = *map(address_of, payloads), *map(address_of, outputs or payloads)
        self._programs[0].launch(0 if self.is_static else ticket, tables.address, num_slots, *inputs, *rows)
        return DevicePlan(tables, *self._of_plan, num_slots, capture)

    def launch_rows(
        self, plan: DevicePlan, outputs: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor], routed: Routed
    ) -> None:
        """Launch rows along a plan whose size is known."""
        addresses = map(address_of, (*payloads, *outputs))
        self._programs[1].launch(0, plan.tables.address, plan.num_slots, routed[0].data_ptr(), 0, *addresses)

    def finish(self, plan: DevicePlan, outputs: Sequence[torch.Tensor], topk_idx: torch.Tensor) -> None:
        """Wait for the size of the outputs unless they are static, and narrow them; ``LateRejection`` of an invalid id.

        What does not depend on the size should be done before: after the launch, and while the device works.
        """
        self._memory.refill()
        if self.is_static:
            return
        outcome = self.wait_for_size(plan)
        if plan.num_slots != self.num_slots:
            narrow(outputs, plan.num_slots)
        if outcome < 0 and (rejection := self._planner.rejection_of(topk_idx) or self._planner.pending_error()):
            raise LateRejection(rejection)

    def wait_for_size(self, plan: DevicePlan) -> int:
        """Wait for the latest plan, and return the outcome of its program."""
        outcome = self._programs[0].wait(self._planner.ticket)
        if outcome < 0:
            self._planner.size_exactly(plan)
        else:
            self._planner.sized(plan, outcome)
        return outcome


class PlanProgram(CallProgram):
    """Call along plans of one shape: other rows, or sums.

    ``num_rows`` is the number of rows of outputs; ``None`` for the slots of the plan.
    """

    # Indices of values, after a ticket of zero: plan, slots; then rows, and outputs.
    TABLES, NUM_SLOTS, FIRST_ROW = range(1, 4)

    def __init__(self, program: Program, outputs: Outputs, num_rows: int | None, num_sms: int) -> None:
        super().__init__(outputs, num_sms)
        self._program, self.num_rows = program, num_rows

    def outputs(self, plan: DevicePlan) -> list[torch.Tensor] | None:
        """Return memory for the outputs; ``RuntimeError`` if there is not enough."""
        if self.num_rows is not None:
            return self._outputs.new(self.num_rows)
        return self._outputs.new(plan.num_slots, plan.rows_per_expert)

    def run(self, outputs: list[torch.Tensor], rows: Sequence[torch.Tensor], plan: DevicePlan) -> None:
        """Launch it, once all ranks agree."""
        addresses = (*map(address_of, rows), *map(address_of, outputs))
        self._program.launch(0, plan.tables.address, plan.num_slots, *addresses)


def run_dispatch(
    program: DispatchProgram,
    outputs: list[torch.Tensor],
    payloads: Sequence[torch.Tensor],
    routed: Routed,
    profile: CallProfile,
    tables: PlanTensors,
    capture: int = 0,
) -> DevicePlan:
    """Run the program of a dispatch with a profile, and return the plan; outputs are like payloads.

    As ``DispatchProgram.run`` and ``finish`` do; ``capture`` is the number of the capture that it is in.
    """
    with profile.spend("wire"):
        plan = program.launch(outputs, payloads, routed, tables, capture)
    if program.num_slots is None:
        with profile.spend("planning"):
            program.wait_for_size(plan)
        with profile.spend("wire"):
            outputs += new_outputs(payloads, plan.num_slots)
            program.launch_rows(plan, outputs, payloads, routed)
    with profile.spend("planning"):
        program.finish(plan, outputs, routed[0])
    program.count(profile)
    return plan


def narrow(outputs: Sequence[torch.Tensor], num_rows: int) -> None:
    """Narrow tensors that may be larger than needed to this number of rows.

    They are changed in place: a view would be one of a larger tensor, which autograd treats differently.
    """
    for output in outputs:
        if output.shape[0] != num_rows:
            output.resize_(num_rows, *output.shape[1:])


def shapes_of(rows: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return shapes, without the number of rows, and dtypes."""
    return tuple((each.shape[1:], each.dtype) for each in rows)


def rows_of_values(payloads: Sequence[torch.Tensor], first: int, first_output: int, num_slots: Value) -> list[Payload]:
    """Return payloads whose addresses are values from an index on, and those of outputs from another one on."""
    return [
        Payload(Value(first + i), row_bytes(payload), Value(first_output + i), num_slots)
        for i, payload in enumerate(payloads)
    ]


def new_outputs(
    inputs: Sequence[torch.Tensor], num_rows: int, rows_per_expert: int | None = None
) -> list[torch.Tensor]:
    """Return memory for rows like those of each input; ``rows_per_expert`` is that of a plan."""
    first = expert_rows_shape(num_rows, rows_per_expert)
    return [each.new_empty(*first, *each.shape[1:]) for each in inputs]

"""Planning on the device: the kernel's launch, the one wait for the output's size, and invalid expert ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from fusco.core.config import StaticRows
from fusco.core.current_stream import capture_number
from fusco.core.errors import RejectedInputError, RowOverflowError, Stall
from fusco.core.recent import Recent
from fusco.core.rows import wants_grad
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import Memory, Number, ticket_after
from fusco.cuda.kernels.launcher import KernelCall
from fusco.cuda.kernels.plan import (
    PlannedRows,
    PlanShape,
    PlanTensors,
    PlanTerms,
    PublishedRouting,
    plan_slots,
    planned_at,
)
from fusco.cuda.within_node.device_plan import CommonFields, DevicePlan
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing

_Plan = TypeVar("_Plan", bound=DevicePlan)
# Rows of a bound that are not needed take memory as long as the output lives: without gradients, to the end of a layer.
# Chosen for a prefill of 8192 tokens of hidden 2048 on 2 ranks, top-8, bf16: 256 MiB. Without a bound the device was
# idle between plan and rows there, for 63 us a layer (2 H200).
MAX_EXTRA_BYTES = 512 << 20
# Outputs that gradients need live until the backward pass, one for each layer.
MAX_EXTRA_BYTES_WITH_GRADIENTS = 16 << 20


class PlanSizes(NamedTuple):
    """Numbers of rows of a plan; see ``PlannedRows``."""

    first_row: tuple[int, ...]
    held: tuple[int, ...]
    shape: PlanShape

    def at(self, address: Number) -> PlannedRows:
        """Return a plan whose tensors begin at an address."""
        return planned_at(self.first_row, self.held, self.shape, address)


_NO_LIMIT = 2**31 - 1
_CLAMPED = 2**31 - 1  # the kernel clamps ids outside int32 to +-(2**31 - 1)


class DevicePlanner:
    """Makes the plans of one rank, in order."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._arena, self._placement = context, context.arena, context.placement
        self.ticket = 0  # of the latest plan
        self._reported_counts = context.tables.reported_counts.numpy()
        self._sizes: Recent[tuple[object, ...], PlanSizes] = Recent()
        topology, rank, local = self._arena.layout.topology, self._arena.rank, self._arena.local
        counterparts = (topology.node_to_ranks[node][local] for node in topology.remote_nodes(rank))
        self._published_sources, self._numbers = (rank, *counterparts), topology.numbers

    def new_plan(
        self,
        plan_type: Callable[..., _Plan],
        request: DispatchRequest,
        num_rows: Sequence[int],
        stream: torch.cuda.Stream,
        held: Sequence[int] = (),
    ) -> _Plan:
        """Return a plan that ``launch`` will make on the device; ``plan_type`` takes the fields of ``DevicePlan``.

        ``num_rows`` are the rows of each source on this node, ``held`` the sources whose rows this rank forwards.
        """
        sizes, static = self.sizes_of(request.routing, num_rows, held), request.static
        num_slots = static.num_slots(sizes.shape.num_local_experts) if static else 0
        fields = self.fields_of(sizes, static, stream)
        return plan_type(self.new_tables(sizes), *fields, num_slots, capture_number())

    def new_tables(self, sizes: PlanSizes) -> PlanTensors:
        """Return memory for a plan alone."""
        return PlanTensors.of(sizes.shape, self._arena.device)

    def fields_of(self, sizes: PlanSizes, static: StaticRows | None, stream: torch.cuda.Stream) -> CommonFields:
        """Return the fields that all plans of these sizes on a stream have in common."""
        first_row, held, shape = sizes
        rows_per_expert = static.rows_per_expert if static else None
        whose = self._arena.rank, self._placement
        return CommonFields(first_row, held, shape.num_topk, *whose, rows_per_expert, stream.cuda_stream)

    def launch(
        self,
        plan: DevicePlan,
        request: DispatchRequest,
        routing: Sequence[tuple[Memory, Memory | None]],
        stream: torch.cuda.Stream,
    ) -> None:
        """Make a plan on the device; see ``call``."""
        number = self.next_ticket()
        call = self.call(plan, request, routing, stream, 0 if request.static else number)
        self._context.timeline.timed("plan", "slots", None, call.launch, stream.cuda_stream)

    def call(
        self,
        plan: PlannedRows,
        request: DispatchRequest,
        routing: Sequence[tuple[Memory, Memory | None]],
        stream: torch.cuda.Stream,
        ticket: Number,
        *,
        is_followed_early: bool = False,
    ) -> KernelCall:
        """Return the kernel that makes a plan.

        ``routing`` is what this rank publishes: ids and weights of its own, then of its counterparts on other nodes.
        ``ticket`` is from ``next_ticket``, or 0 for static rows; for ``is_followed_early`` see ``PlanTerms``.
        """
        static = request.static
        published = [
            PublishedRouting(source, ids, of_source)
            for source, (ids, of_source) in zip(self._published_sources, routing, strict=True)
        ]
        terms = PlanTerms(
            request.expert_alignment,
            max_slots=static.num_slots(plan.tables.shape.num_local_experts) if static else _NO_LIMIT,
            is_overflow_reported=static is not None and static.on_overflow == "raise",
            num_sms=request.launch.num_sms,
            rows_per_expert=(static and static.rows_per_expert) or 0,
            is_followed_early=is_followed_early,
        )
        return plan_slots(self._context.launcher(stream), self._context.tables, plan, published, terms, ticket)

    def next_ticket(self) -> int:
        """Return the number of another plan."""
        self.ticket = number = ticket_after(self.ticket)
        return number

    def is_reported(self, ticket: int) -> bool:
        """Return whether a plan whose size is exact, or a later one, is made."""
        return bool((self._arena.plan_report.ticket - ticket) % 2**32 < 2**31)  # tickets begin again

    def sizes_of(self, routing: Routing, num_rows: Sequence[int], held: Sequence[int] = ()) -> PlanSizes:
        """Return the sizes of a plan; see ``new_plan``."""
        weight_dtype = None if routing.topk_weights is None else routing.topk_weights.dtype
        key = (tuple(num_rows), tuple(held), routing.num_topk, weight_dtype)
        if (known := self._sizes.use(key)) is not None:
            return known
        first_row, holders = (0, *itertools.accumulate(num_rows)), (self._arena.rank, *held)
        num_held_rows, num_local = sum(num_rows[source] for source in holders), self._context.tables.num_local_experts
        shape = PlanShape(first_row[-1], num_held_rows, routing.num_topk, num_local, weight_dtype)
        sizes = self._sizes[key] = PlanSizes(first_row, holders, shape)
        return sizes

    def size_exactly(self, plan: _Plan) -> _Plan:
        """Wait for the latest plan, and return it with its number of slots and of each expert's rows."""
        num_slots = self._arena.plan_report.num_slots(self.ticket)
        return self.sized(plan, self._wait_for(self.ticket) if num_slots is None else num_slots)

    def sized(self, plan: _Plan, num_slots: int) -> _Plan:
        """Return the latest plan with its number of slots and of each expert's rows, once it has reported."""
        plan.num_slots, plan.reported_counts = num_slots, self._reported_counts.tobytes()
        return plan

    def _wait_for(self, ticket: int) -> int:
        begun_of, report = self._arena.report, self._arena.plan_report
        peers = tuple(rank for rank in self._arena.node_ranks if rank != self._arena.rank)

        def stall() -> Stall:
            if begun_of.begun != ticket:  # until then, no peer is to blame
                return own_backlog("the plan")
            return Stall("planning on the device", peers, "the plan", "none yet")

        self._context.watchdog.wait_until(lambda: report.ticket == ticket, stall)
        num_slots = report.num_slots(ticket)
        assert num_slots is not None, ticket
        return num_slots

    def rejection_of(self, topk_idx: torch.Tensor) -> Exception | None:
        """Return the error of an invalid expert id in the latest plan: ``ValueError`` on its rank, else a rejection."""
        invalid = self._arena.plan_report.take_invalid_pair(is_static=False)
        if invalid is None:
            return None
        src, token, k, bad_id = invalid
        if src == self._arena.rank and abs(bad_id) == _CLAMPED:
            bad_id = int(topk_idx[token, k])
        number, reason = self._numbers[src], self._context.describe_invalid_id(token, k, bad_id)
        if src == self._arena.rank:
            return ValueError(reason)
        return RejectedInputError(
            f"dispatch was cancelled on all ranks, since rank {number} rejected its input: {reason}"
        )

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier plan into static rows: no host has waited for it."""
        report = self._arena.plan_report
        if invalid := report.take_invalid_pair(is_static=True):
            src, token, k, expert_id = invalid
            reason = self._context.describe_invalid_id(token, k, expert_id)
            return ValueError(f"in an earlier dispatch into static rows, rank {self._numbers[src]} passed {reason}")
        if overflow := report.take_overflow():
            expert = overflow.local_expert
            return RowOverflowError(self._context.number, overflow.limit, overflow.needed, local_expert=expert)
        return None


@lru_cache(maxsize=1024)
def affordable_bound(
    num_pairs: int, num_local_experts: int, expert_alignment: int, num_ranks: int, row_bytes: int, *, needs_grad: bool
) -> int | None:
    """Return the maximum number of rows of a dispatch on one rank, or ``None`` if they may take too much memory.

    The maximum is every pair, of all ranks, and the padding of every block. What of it is not needed is estimated for
    balanced routing, of which each rank gets an equal share. ``row_bytes`` are those of all payloads together, and
    ``needs_grad`` says whether the output is kept for gradients.

    >>> affordable_bound(16, 4, 8, 1, 14336, needs_grad=True)
    44
    >>> affordable_bound(8192, 32, 1, 8, 14336, needs_grad=False)
    8192
    >>> affordable_bound(8192, 32, 1, 8, 14336, needs_grad=True) is None
    True
    >>> affordable_bound(131072, 64, 1, 2, 4096, needs_grad=False)
    131072
    >>> affordable_bound(65536, 32, 1, 8, 14336, needs_grad=False) is None
    True
    """
    bound = num_pairs + min(num_pairs, num_local_experts) * (expert_alignment - 1)
    extra_bytes = (bound - num_pairs // num_ranks) * row_bytes
    return bound if extra_bytes <= (MAX_EXTRA_BYTES_WITH_GRADIENTS if needs_grad else MAX_EXTRA_BYTES) else None


def affordable_bound_of(
    shape: PlanShape, num_ranks: int, request: DispatchRequest, row_bytes: Sequence[int]
) -> int | None:
    """Return the rows of an output that is large enough for any plan of this shape; see ``affordable_bound``."""
    needs_grad = wants_grad(request.payloads[0])  # of several payloads none does
    return affordable_bound(
        shape.num_rows * shape.num_topk,
        shape.num_local_experts,
        request.expert_alignment,
        num_ranks,
        sum(row_bytes),
        needs_grad=needs_grad,
    )

"""Dispatch and combine within a node: plan, pull rows into their slots, and sum them, as kernels on one stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.profile import Call
from fusco.core.rows import aligned
from fusco.cuda.context import CudaContext
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.own_rows import OwnRows, PublishedRows, Transfer
from fusco.cuda.planning import DevicePlanner
from fusco.engine.base import (
    CombineRequest,
    DispatchOutput,
    DispatchRequest,
    LateRejection,
    Pending,
    RedispatchRequest,
)
from fusco.planner.routing import Routing


class IntranodeShuffle:
    """Dispatch and combine of one rank where there is one node."""

    def __init__(self, context: CudaContext, planner: DevicePlanner, own_rows: OwnRows) -> None:
        self._context, self._planner, self._own_rows = context, planner, own_rows

    def pending_error(self) -> None:
        """Return no error: plans report all that there are."""

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[DevicePlan]]:
        """Plan and move rows."""
        payloads = list(map(aligned, request.payloads))

        def run(counts: Sequence[Sequence[int]]) -> DispatchOutput[DevicePlan]:
            published = list(map(PublishedRows.unpack, counts))
            transfer = Transfer(payloads=payloads, published=published, launch=request.launch, stream=stream, call=call)
            return self._dispatch(request, transfer)

        return Pending(self._own_rows.publish(request.routing.num_tokens, payloads).pack(), run)

    def prepare_redispatch(
        self, request: RedispatchRequest[DevicePlan], call: Call, stream: torch.cuda.Stream
    ) -> Pending[list[torch.Tensor]]:
        """Move rows along an earlier plan."""
        plan, payloads = request.plan, list(map(aligned, request.payloads))

        def run(counts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
            published = list(map(PublishedRows.unpack, counts))
            transfer = Transfer(payloads=payloads, published=published, launch=request.launch, stream=stream, call=call)
            with self._own_rows.staging(transfer) as staging_sms, call.profile.spend("wire"):
                return self._own_rows.scatter(plan, plan.rows, transfer, staging_sms)

        return Pending(self._own_rows.publish(plan.num_tokens, payloads).pack(), run)

    def combine(self, request: CombineRequest[DevicePlan], call: Call, stream: torch.cuda.Stream) -> torch.Tensor:
        """Sum rows."""
        plan, rows = request.plan, aligned(request.rows)
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        with self._context.timeline.span("sum", "tokens", stream):
            num_sms = combine_rows(
                self._context.launcher(stream),
                plan.rows,
                rows,
                self._context.wire_dtype(rows.dtype),
                out,
                is_weighted=request.is_weighted,
                num_sms=request.launch.num_sms,
            )
        call.profile.count_sms(num_sms)
        return out

    def _dispatch(self, request: DispatchRequest, transfer: Transfer) -> DispatchOutput[DevicePlan]:
        routing, stream, profile = request.routing, transfer.stream, transfer.call.profile
        if not request.static:
            self._planner.begin(stream)
        with self._own_rows.staging(transfer) as staging_sms:
            with profile.spend("planning"):
                routing_of_rank = [(routing.topk_idx.contiguous(), detached_weights(routing))]
                num_rows = [of_rank.num_tokens for of_rank in transfer.published]
                plan = self._planner.make_plan(DevicePlan, request, routing_of_rank, num_rows, stream)
                if not request.static:
                    plan = self._planner.size_exactly(plan)
            with profile.spend("wire"):
                rows = self._own_rows.scatter(plan, plan.rows, transfer, staging_sms)
        if not request.static and (rejection := self._planner.rejection_of(routing)):
            raise LateRejection(rejection)
        return DispatchOutput(plan, rows)


def detached_weights(routing: Routing) -> torch.Tensor | None:
    """Return the weights, detached and contiguous, or ``None``."""
    return None if routing.topk_weights is None else routing.topk_weights.detach().contiguous()

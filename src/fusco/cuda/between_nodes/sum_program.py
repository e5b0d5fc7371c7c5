"""Program of a combine between nodes whose sums are one slice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.core.rows import accumulation_dtype
from fusco.cuda.between_nodes.nccl import Message, num_bytes_of
from fusco.cuda.between_nodes.network import Network, SpareEvents
from fusco.cuda.between_nodes.plan import InternodePlan, own_runs, runs_of_slice
from fusco.cuda.between_nodes.slice_sender import SliceRing, num_rows_per_slice
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import RowsAt, Value
from fusco.cuda.kernels.add_returned import ReturnedSums, add_returned
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.plan_forwarding import ForwardingAddresses
from fusco.cuda.kernels.program import Program, Step, record_event, wait_for_event
from fusco.cuda.within_node.programs import Outputs, PlanProgram, new_outputs
from fusco.planner.internode import InternodeTraffic

_ALIGNMENT = 16  # of rows, in bytes
_MAX_EARLY_BYTES = 16 << 20  # of memory that a combine may have before it is called: more is in calls that take long


@dataclass(frozen=True)
class SumMaker:
    """Makes programs of combines."""

    context: CudaContext
    ring: SliceRing
    network: Network

    def make(
        self,
        plan: InternodePlan,
        given: torch.Tensor,
        stream: torch.cuda.Stream,
        num_sms: int | None,
        *,
        is_weighted: bool,
    ) -> InternodeSumProgram | None:
        """Return the program of a combine of one slice of rows that follow each other; ``None`` for other ones.

        ``None`` for quantised sums, too, of which copies of PyTorch are a part.
        """
        of, traffic, context = InternodeSumProgram, plan.traffic, self.context
        wire_dtype, hidden = context.wire_dtype(given.dtype), given.shape[1]
        wire = context.wire(given.dtype, hidden)
        if wire.quantize is not None:
            return None
        size = wire.row_bytes
        rows_per_slice, planned = num_rows_per_slice(context.layout, traffic, size), plan.at(Value(of.TABLES))
        own = planned.run_of(own_runs(traffic, planned), traffic.local)
        is_whole = traffic.num_slices(rows_per_slice) == 1 and not traffic.is_shared and plan.num_tokens and size
        if not is_whole or own is None:
            return None
        of_others = planned.run_of(runs_of_slice(traffic, 0, rows_per_slice), traffic.local)
        if of_others is None:
            return None
        launcher = context.launcher(stream)
        rows, wide = RowsAt(Value(of.ROWS), given.dtype, hidden), accumulation_dtype(given.dtype)
        slot = self.ring.slot(0, stream, wire_dtype)
        outs = RowsAt(slot.data_ptr(), wire_dtype, hidden), RowsAt(Value(of.SCRATCH), wide, hidden)
        sums = [
            combine_rows(launcher, held, rows, wire_dtype, out, is_weighted=is_weighted, num_sms=num_sms)
            for held, out in zip((of_others, own), outs, strict=True)
        ]
        node_to_place, scratch_bytes = _places_in_scratch(traffic, plan.num_tokens * hidden * wide.itemsize, size)
        sends = returning_sums(traffic, 0, rows_per_slice, size, slot.data_ptr())
        receives = [
            Message(piece.forwarder, Value(of.SCRATCH, place + piece.first * size), piece.num_rows * size)
            for piece in traffic.sends(0, rows_per_slice)
            for place in [node_to_place[piece.node]]
        ]
        messages = self.network.prepare(sends, receives, "sums of slice 0", self.network.stream)
        forwarding = ForwardingAddresses(Value(of.FORWARDING), plan.forwarding.num_nodes, plan.num_tokens)
        returned = ReturnedSums(
            [Value(of.SCRATCH, place) for place in node_to_place.values()],
            [forwarding.places(node) for node in node_to_place],
            wire_dtype,
        )
        out = RowsAt(Value(of.OUT), given.dtype, hidden)
        added = add_returned(launcher, Value(of.SCRATCH), returned, out, plan.num_tokens)
        assert added
        produced, library = stream.record_event(), context.library
        calls: list[Step] = [
            sums[0],
            record_event(library, stream.cuda_stream, produced.cuda_event),
            wait_for_event(library, self.network.stream.cuda_stream, produced.cuda_event),
            *messages.calls,
            record_event(library, self.network.stream.cuda_stream, Value(of.EVENT)),
            sums[1],
            wait_for_event(library, stream.cuda_stream, Value(of.EVENT)),
            added,
        ]
        program = Program(calls, of.NUM_VALUES, stream.cuda_stream)
        kept = Kept(scratch_bytes, num_bytes_of(sends), size, messages.stall, stream, produced)
        return InternodeSumProgram(self, program, plan, given, max(each.grid for each in sums), kept)


class Kept(NamedTuple):
    """What a combine has in common with the next."""

    scratch_bytes: int  # memory for sums of parts: this node's, then those that other nodes return
    sent_bytes: int
    row_bytes: int  # of a row that is sent
    stall: Stall  # the wait for messages
    stream: torch.cuda.Stream
    is_produced: torch.cuda.Event  # recorded once what is sent is made


def returning_sums(
    traffic: InternodeTraffic, number: int, rows_per_slice: int, row_bytes: int, address: int
) -> list[Message]:
    """Return the messages of a slice of sums, one behind the other from an address on, to their carriers."""
    sends = []
    for piece in traffic.receives(traffic.rank, number, rows_per_slice):
        sends.append(Message(piece.carrier, address, piece.num_rows * row_bytes))
        address += piece.num_rows * row_bytes
    return sends


def _places_in_scratch(traffic: InternodeTraffic, own_bytes: int, row_bytes: int) -> tuple[dict[int, int], int]:
    """Return where the sums that each node returns are, behind this node's, and the bytes of all."""
    num_returned = [traffic.num_rows[traffic.rank][node] for node in traffic.destinations]
    parts = [own_bytes, *(num_rows * row_bytes for num_rows in num_returned)]
    places = [*itertools.accumulate((math.ceil(part / _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0)]
    return dict(zip(traffic.destinations, places[1:-1], strict=True)), places[-1]


class InternodeSumProgram(PlanProgram):
    """See ``PlanProgram``; of one tensor."""

    TABLES, ROWS, OUT, FORWARDING, SCRATCH, EVENT, NUM_VALUES = range(1, 8)

    def __init__(
        self, maker: SumMaker, program: Program, plan: InternodePlan, given: torch.Tensor, num_sms: int, kept: Kept
    ) -> None:
        device, num_tokens = maker.context.arena.device, plan.num_tokens
        super().__init__(program, Outputs([given], device), num_tokens, num_sms)
        self.num_tokens = num_tokens
        self._network, self._traffic, self._of_plan = maker.network, plan.traffic, shape_of(plan)
        self._kept, self._events, self._num_empty = kept, SpareEvents(), 0
        self._scratch = Outputs([torch.empty(0, kept.scratch_bytes, dtype=torch.uint8, device="meta")], device)
        self._is_inference = torch.is_inference_mode_enabled()
        out_bytes = num_tokens * given.shape[1] * given.dtype.itemsize
        self._is_small = kept.scratch_bytes + out_bytes <= _MAX_EARLY_BYTES

    def expect(self, plan: InternodePlan) -> None:
        """Allocate memory for a combine that will probably follow a dispatch: meanwhile the host would only wait."""
        if self._is_small and self.is_of(plan) and torch.is_inference_mode_enabled() is self._is_inference:
            with suppress(RuntimeError):  # of PyTorch; running out of memory is one
                plan.allocated = self, self._new_memory()

    def is_of(self, plan: InternodePlan) -> bool:
        """Return whether a plan differs from the one that this was made for in addresses alone."""
        return plan.traffic is self._traffic and shape_of(plan) == self._of_plan

    def _new_memory(self) -> list[torch.Tensor]:
        """Return memory for sums of parts, and for the result; ``RuntimeError`` if there is not enough."""
        return [*self._scratch.new(1), *self._outputs.new(self.num_tokens)]

    def outputs_like(self, given: torch.Tensor) -> list[torch.Tensor]:
        """Return memory as ``outputs`` does, but for a result like the given rows."""
        scratch = given.new_empty(self._kept.scratch_bytes, dtype=torch.uint8)
        return [scratch, *new_outputs([given], self.num_tokens)]

    def outputs(self, plan: Any) -> list[torch.Tensor] | None:
        """See ``PlanProgram``; ahead of the result is memory that ``run`` takes away."""
        if plan.traffic is not self._traffic:
            return None
        allocated, plan.allocated = plan.allocated, None
        return allocated[1] if allocated and allocated[0] is self else self._new_memory()

    def run(self, outputs: list[torch.Tensor], rows: Sequence[torch.Tensor], plan: Any) -> None:
        kept = self._kept
        scratch, event = outputs.pop(0), self._events.take(kept.stream)
        self._num_empty = plan.num_empty_rows
        if plan.made_by and (dispatch := plan.made_by()):
            dispatch.combine, dispatch.num_early = self, 0
        (y,), (out,) = rows, outputs
        addresses = (plan.tables.address, y.data_ptr(), out.data_ptr(), plan.forwarding.address, scratch.data_ptr())
        call = partial(self._program.launch, 0, *addresses, event.cuda_event)
        self._network.launch(call, kept.stall, event.query, partial(self._events.give_back, event))

    def count(self, profile: CallProfile) -> None:
        super().count(profile)
        profile.internode_row_bytes += self._kept.sent_bytes
        profile.internode_empty_bytes = self._num_empty * self._kept.row_bytes


def shape_of(plan: InternodePlan) -> tuple[object, ...]:
    """Return what programs depend on: another plan may differ in addresses and ``num_slots``."""
    return plan.first_row, plan.tables.shape, plan.stream

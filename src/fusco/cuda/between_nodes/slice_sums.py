"""Combine between nodes in slices: sums of other nodes' tokens return while the next slice is summed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.quantization import dequantize_rows
from fusco.core.rows import accumulation_dtype
from fusco.core.wire import Wire
from fusco.cuda.between_nodes.nccl import Message, num_bytes_of
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.between_nodes.slice_sender import SliceRing, num_rows_per_slice
from fusco.cuda.between_nodes.sum_program import returning_sums
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import RowsAt
from fusco.cuda.kernels.add_returned import ReturnedSums, add_returned
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.node_barrier import node_barrier
from fusco.cuda.kernels.quantize_rows import quantize_rows
from fusco.cuda.tuning import INTERNODE_SMS
from fusco.engine.base import CombineRequest

_LAUNCH = Launch(num_sms=INTERNODE_SMS)


def with_internode_sms(launch: Launch) -> Launch:
    """Return launch options with a budget of SMs, by default that of calls between nodes."""
    if launch == Launch():
        return _LAUNCH
    return launch if launch.num_sms else replace(launch, num_sms=INTERNODE_SMS)


class _Summing(NamedTuple):
    """Inputs of every launch of a combine."""

    request: CombineRequest[InternodePlan]
    rows: torch.Tensor  # aligned
    wire: Wire
    launcher: Launcher  # on ``stream``
    stream: torch.cuda.Stream
    call: Call


class SliceSums:
    """Sums rows of one rank, slice by slice."""

    def __init__(self, context: CudaContext, ring: SliceRing, network: Network) -> None:
        self._context, self._ring, self._network = context, ring, network
        self._arena, self._layout, self._topology = context.arena, context.layout, context.topology

    def sum(
        self, request: CombineRequest[InternodePlan], rows: torch.Tensor, stream: torch.cuda.Stream, call: Call
    ) -> torch.Tensor:
        """Sum rows: other nodes' tokens first, in slices, so that their sums are sent while local tokens are summed."""
        wire, launcher = self._context.wire(rows.dtype, rows.shape[1]), self._context.launcher(stream)
        summing = _Summing(request, rows, wire, launcher, stream, call)
        plan, timeline = request.plan, self._context.timeline
        returned, arrival = self._return_sums(summing)
        own = rows.new_empty(plan.num_tokens, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
        with timeline.span("sum", "own tokens", stream):
            self._sum(summing, plan.own_rows, own)
        if arrival:
            stream.wait_event(arrival)
            if plan.traffic.is_shared:
                self._fetch_sums(summing, returned)
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        call.profile.internode_empty_bytes = plan.num_empty_rows * wire.row_bytes
        nodes = sorted(returned)
        places = [plan.forwarding.places(node) for node in nodes]
        parts = [read_sums(returned[node], wire, rows.shape[1]) for node in nodes]
        sums = ReturnedSums([part.data_ptr() for part in parts], places, wire.sum_dtype)
        with timeline.span("add", "sums of other nodes", stream):
            if adding := add_returned(launcher, own.data_ptr(), sums, RowsAt.of(out), plan.num_tokens):
                adding.launch(stream.cuda_stream)
        return out

    def _return_sums(self, summing: _Summing) -> tuple[dict[int, torch.Tensor], torch.cuda.Event | None]:
        """Launch sums of other nodes' tokens; return the buffers of returning sums by node, and the last arrival."""
        request, rows, wire, launcher, stream, call = summing
        plan, traffic, timeline, size = request.plan, request.plan.traffic, self._context.timeline, wire.row_bytes
        rows_per_slice = num_rows_per_slice(self._layout, traffic, size)
        own_rows = traffic.num_rows[plan.rank]
        returned = {n: rows.new_empty(own_rows[n], wire.width, dtype=wire.dtype) for n in traffic.destinations}
        carried = self._arena.address(self._arena.local, self._layout.offsets["pool"])
        streams = stream, self._network.stream
        arrival = None
        for number, held in enumerate(plan.slices(rows_per_slice)):
            sums = self._ring.slot(number, stream, wire.dtype)
            with timeline.span("sum", f"slice {number}", stream):
                if wire.quantize is None:
                    self._sum(summing, held, sums)
                else:
                    first, end = held.first_row[traffic.local : traffic.local + 2]
                    wide = rows.new_empty(end - first, rows.shape[1], dtype=wire.sum_dtype)
                    self._sum(summing, held, wide)
                    write_sums(launcher, wide, wire, sums)
            sends = returning_sums(traffic, number, rows_per_slice, size, sums.data_ptr())
            receives = []
            for piece in traffic.sends(number, rows_per_slice):
                is_own = piece.src == plan.rank
                place = returned[piece.node].data_ptr() + piece.first * size if is_own else carried + piece.place * size
                receives.append(Message(piece.forwarder, place, piece.num_rows * size))
            call.profile.internode_row_bytes += num_bytes_of(sends)
            arrival = self._ring.exchange(number, sends, receives, f"sums of slice {number}", streams, timeline)
        return returned, arrival

    def _fetch_sums(self, summing: _Summing, returned: dict[int, torch.Tensor]) -> None:
        """Copy the sums of this rank's rows that others of its node carry, as soon as all have received theirs."""
        traffic, nodes = summing.request.plan.traffic, self._topology.rank_to_local
        with self._context.timeline.span("copy", "sums that other ranks carried", summing.stream):
            node_barrier(summing.launcher)
            tables = (*(column.tolist() for column in traffic.own), traffic.own_places.tolist())
            for _, node, first, end, carrier, _, place in zip(*tables, strict=True):
                if carrier != traffic.rank:
                    sums = returned[node][first:end]
                    sums.copy_(self._arena.pooled_like(nodes[carrier], place, sums))
                    summing.call.profile.lane_row_bytes += sums.nbytes
            node_barrier(summing.launcher)  # carriers may overwrite them

    def _sum(self, summing: _Summing, held: HeldRows, out: torch.Tensor) -> None:
        request, rows, _, launcher, stream, call = summing
        wire_dtype = self._context.wire_dtype(rows.dtype)
        sums = RowsAt(out.data_ptr(), out.dtype, rows.shape[1])  # a slot has rows in one dimension
        num_sms, is_weighted = with_internode_sms(request.launch).num_sms, request.is_weighted
        summed = combine_rows(
            launcher, held, RowsAt.of(rows), wire_dtype, sums, is_weighted=is_weighted, num_sms=num_sms
        )
        summed.launch(stream.cuda_stream)
        call.profile.count_sms(summed.grid)


def write_sums(launcher: Launcher, sums: torch.Tensor, wire: Wire, slot: torch.Tensor) -> None:
    """Write float32 sums (num_rows, hidden) to the first bytes of a slot as rows of the wire; the launcher's stream.

    The kernel writes codes and scales apart; two copies of PyTorch put them together.
    """
    assert wire.quantize is not None
    num_rows, hidden = sums.shape
    values = sums.new_empty(num_rows, hidden, dtype=torch.uint8)
    scales = sums.new_empty(num_rows, hidden // wire.quantize.columns)
    quantize_rows(launcher, sums, wire.quantize, values, scales)
    rows = slot[: num_rows * wire.width].view(num_rows, wire.width)
    rows[:, :hidden].copy_(values)
    rows[:, hidden:].copy_(scales.view(torch.uint8))


def read_sums(rows: torch.Tensor, wire: Wire, hidden: int) -> torch.Tensor:
    """Return sums (num_rows, hidden) of rows of the wire (num_rows, width): float32 if they are quantised."""
    if wire.quantize is None:
        return rows
    values = rows[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    scales = rows[:, hidden:].contiguous().view(torch.float32)
    return dequantize_rows(values, scales, wire.quantize, torch.float32)

"""Rows for other nodes: packed in slices, and sent into the pools of their forwarders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from fusco.core.rows import row_bytes
from fusco.cuda.between_nodes.latest_launches import LatestDispatch
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.slice_ring import SliceRing
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.gather_rows import Part, gather_rows
from fusco.cuda.kernels.launcher import Launcher, PreparedLaunch
from fusco.cuda.kernels.node_barrier import node_barrier
from fusco.cuda.kernels.plan_forwarding import ForwardingTensors
from fusco.cuda.memory.arena import Arena
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.within_node.own_rows import Transfer
from fusco.planner.internode import InternodeTraffic, Piece


class SliceSender:
    """Packs rows of a dispatch, slice by slice, and sends them, on streams of their own."""

    def __init__(
        self, context: CudaContext, network: Network, ring: SliceRing, packing_stream: torch.cuda.Stream
    ) -> None:
        self._context, self._network, self._ring = context, network, ring
        self._arena, self._layout, self._packing_stream = context.arena, context.layout, packing_stream
        self._has_begun = context.gpu.new_event()
        self._gathers: list[tuple[PreparedLaunch, Sequence[Part], int]] = []  # of the latest slice

    def send(
        self,
        transfer: Transfer,
        forwarding: ForwardingTensors,
        traffic: InternodeTraffic,
        with_first: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
        latest: LatestDispatch | None = None,
    ) -> Iterator[torch.cuda.Event]:
        """Launch the transfer of each slice into the forwarders' pools; yield an event for each that arrives here.

        ``with_first``: messages, sent and received, that travel with the first slice. ``latest`` takes the launches of
        a dispatch with one slice, which is on the caller's stream alone: nothing can overlap with it.
        """
        timeline, packing = self._context.timeline, self._packing_stream
        sizes = list(map(row_bytes, transfer.payloads))
        rows_per_slice = num_rows_per_slice(self._layout, traffic, sum(sizes))
        starts = forwarded_starts(self._arena, traffic, sizes)
        num_slices = traffic.num_slices(rows_per_slice)
        is_alone = num_slices == 1 and bool(with_first[0] or with_first[1])
        if is_alone:
            packing = transfer.stream
        elif num_slices:
            self._has_begun.record(transfer.stream)
            packing.wait_event(self._has_begun)  # and so does the network: no peer reads the pool after earlier work
        first_row = 0  # of what arrives next, in the pool
        for number in range(num_slices):
            self._ring.slot(number, packing, torch.uint8)
            with timeline.span("gather", f"slice {number}", packing):
                sends = self._pack(transfer, forwarding, traffic, number, rows_per_slice, packing)
            receives: list[Message] = []
            for piece in traffic.receives(traffic.rank, number, rows_per_slice):
                for start, size in zip(starts, sizes, strict=True):
                    receives.append(Message(piece.carrier, start + first_row * size, piece.num_rows * size))
                first_row += piece.num_rows
            transfer.call.profile.internode_row_bytes += sum(message.num_bytes for message in sends)
            if is_alone and latest:
                latest.sends, latest.receives, latest.gathers, latest.is_alone = sends, receives, self._gathers, True
            if number == 0:
                sends, receives = [*sends, *with_first[0]], [*receives, *with_first[1]]
            network = packing if is_alone else self._network.stream
            yield self._ring.exchange(number, sends, receives, f"slice {number}", (packing, network), timeline)

    def _pack(
        self,
        transfer: Transfer,
        forwarding: ForwardingTensors,
        traffic: InternodeTraffic,
        number: int,
        rows_per_slice: int,
        packing: torch.cuda.Stream,
    ) -> list[Message]:
        """Pack this rank's rows of a slice into the slots of their carriers; return the messages that it carries."""
        launcher, rank, profile = self._context.launcher(packing), traffic.rank, transfer.call.profile
        pieces = [piece for piece in traffic.pieces(number, rows_per_slice) if piece.carrier in traffic.node_ranks]
        free = {
            carrier: self._arena.address(local, self._layout.slice_offset(number))
            for local, carrier in enumerate(traffic.node_ranks)
        }
        messages: dict[Piece, list[Message]] = {piece: [] for piece in pieces if piece.carrier == rank}
        if traffic.is_shared:
            node_barrier(launcher)  # the slots of all carriers are free
        self._gathers = []
        for of_payload, payload in enumerate(transfer.payloads):
            parts, size = [], row_bytes(payload)
            for piece in pieces:
                if piece.src == rank:
                    place = forwarding.address + forwarding.offset_of_tokens(piece.node, piece.first)
                    parts.append(Part(place, free[piece.carrier], piece.num_rows))
                    profile.lane_row_bytes += piece.num_rows * size * (piece.carrier != rank)
                if piece.carrier == rank:
                    messages[piece].append(Message(piece.forwarder, free[rank], piece.num_rows * size))
                free[piece.carrier] += piece.num_rows * size
            free = {carrier: -(-address // 16) * 16 for carrier, address in free.items()}
            self._gather(launcher, payload, parts, of_payload)
        if traffic.is_shared:
            node_barrier(launcher)  # all rows are in the slots
        return list(itertools.chain.from_iterable(messages.values()))

    def _gather(self, launcher: Launcher, payload: torch.Tensor, parts: list[Part], number: int) -> None:
        """Gather by launches of as many parts as there are other nodes: so many without lanes, and one kernel."""
        num_remote = self._context.topology.num_nodes - 1
        for first in range(0, len(parts), num_remote):
            of_launch = parts[first : first + num_remote]
            of_launch += [Part(0, 0, 0)] * (num_remote - len(of_launch))
            if launched := gather_rows(launcher, payload, of_launch):
                self._gathers.append((launched, of_launch, number))


def num_rows_per_slice(layout: DeviceLayout, traffic: InternodeTraffic, row_bytes: int) -> int:
    """Return the rows in a slice."""
    return traffic.fit(layout.rows_per_slice(row_bytes), layout.max_held_rows(row_bytes))


def forwarded_starts(arena: Arena, traffic: InternodeTraffic, sizes: list[int]) -> list[int]:
    """Return the addresses of the payloads that this rank forwards."""
    offsets = (arena.layout.pool_offset(traffic.num_forwarded, sizes, p) for p in range(len(sizes)))
    return [arena.address(arena.local, offset) for offset in offsets]

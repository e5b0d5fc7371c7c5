"""Rows for other nodes: packed in slices, and sent into the pools of their forwarders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fusco.core.rows import row_bytes
from fusco.core.timeline import NoTimeline, Timeline
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import Number
from fusco.cuda.kernels.gather_rows import Part, gather_rows
from fusco.cuda.kernels.launcher import KernelCall
from fusco.cuda.kernels.node_barrier import node_barrier
from fusco.cuda.kernels.plan_forwarding import ForwardingAddresses, ForwardingTensors
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

    def send(
        self,
        transfer: Transfer,
        forwarding: ForwardingTensors,
        traffic: InternodeTraffic,
        with_first: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
    ) -> Iterator[torch.cuda.Event]:
        """Launch the transfer of each slice into the forwarders' pools; yield an event for each that arrives here.

        ``with_first``: messages, sent and received, that travel with the first slice. With them, a single slice is on
        the caller's stream alone: nothing can overlap with it.
        """
        timeline, packing, profile = self._context.timeline, self._packing_stream, transfer.call.profile
        rows = [(payload.data_ptr(), row_bytes(payload)) for payload in transfer.payloads]
        rows_per_slice = num_rows_per_slice(self._layout, traffic, sum(transfer.row_bytes))
        num_slices, starts = (
            traffic.num_slices(rows_per_slice),
            forwarded_starts(self._arena, traffic, transfer.row_bytes),
        )
        is_alone = num_slices == 1 and bool(with_first[0] or with_first[1])
        if is_alone:
            packing = transfer.stream
        elif num_slices:
            self._has_begun.record(transfer.stream)
            packing.wait_event(self._has_begun)  # and so does the network: no peer reads the pool after earlier work
        first_row = 0  # of what arrives next, in the pool
        for number in range(num_slices):
            self._ring.slot(number, packing, torch.uint8)
            packed = self.pack(rows, forwarding, traffic, number, packing)
            with timeline.span("gather", f"slice {number}", packing):
                self._launch(packed.gathers, packing, is_shared=traffic.is_shared)
            receives = self.receives(traffic, starts, transfer.row_bytes, number, first_row)
            first_row += sum(piece.num_rows for piece in traffic.receives(traffic.rank, number, rows_per_slice))
            profile.internode_row_bytes += sum(message.num_bytes for message in packed.sends)
            profile.lane_row_bytes += packed.lane_bytes
            sends: Sequence[Message] = packed.sends
            if number == 0:
                sends, receives = [*sends, *with_first[0]], [*receives, *with_first[1]]
            network = packing if is_alone else self._network.stream
            yield self._ring.exchange(number, sends, receives, f"slice {number}", (packing, network), timeline)

    def receives(
        self, traffic: InternodeTraffic, starts: Sequence[int], sizes: Sequence[int], number: int, first_row: int = 0
    ) -> list[Message]:
        """Return the messages of a slice that this rank receives; ``first_row`` is that of the first, in its pool."""
        messages = []
        for piece in traffic.receives(traffic.rank, number, num_rows_per_slice(self._layout, traffic, sum(sizes))):
            for start, size in zip(starts, sizes, strict=True):
                messages.append(Message(piece.carrier, start + first_row * size, piece.num_rows * size))
            first_row += piece.num_rows
        return messages

    def pack(
        self,
        rows: Sequence[tuple[Number, int]],
        forwarding: ForwardingAddresses,
        traffic: InternodeTraffic,
        number: int,
        stream: torch.cuda.Stream,
    ) -> Packed:
        """Return how this rank's rows of a slice get into the slots of carriers; ``rows`` are address and size."""
        rank, lane_bytes = traffic.rank, 0
        gathers: list[KernelCall] = []
        rows_per_slice = num_rows_per_slice(self._layout, traffic, sum(size for _, size in rows))
        pieces = [piece for piece in traffic.pieces(number, rows_per_slice) if piece.carrier in traffic.node_ranks]
        free = {
            carrier: self._arena.address(local, self._layout.slice_offset(number))
            for local, carrier in enumerate(traffic.node_ranks)
        }
        messages: dict[Piece, list[Message]] = {piece: [] for piece in pieces if piece.carrier == rank}
        for address, size in rows:
            parts = []
            for piece in pieces:
                if piece.src == rank:
                    place = forwarding.tokens(piece.node, piece.first)
                    parts.append(Part(place, free[piece.carrier], piece.num_rows))
                    lane_bytes += piece.num_rows * size * (piece.carrier != rank)
                if piece.carrier == rank:
                    messages[piece].append(Message(piece.forwarder, free[rank], piece.num_rows * size))
                free[piece.carrier] += piece.num_rows * size
            free = {carrier: -(-at // 16) * 16 for carrier, at in free.items()}
            gathers += self._gathers(address, size, parts, stream)
        return Packed(gathers, list(itertools.chain.from_iterable(messages.values())), lane_bytes)

    def _gathers(
        self, rows: Number, size: int, parts: Sequence[Part], stream: torch.cuda.Stream
    ) -> Iterator[KernelCall]:
        """Yield launches of as many parts as there are other nodes: so many without lanes, and one kernel."""
        num_remote, launcher = self._context.topology.num_nodes - 1, self._context.launcher(stream)
        for first in range(0, len(parts), num_remote):
            of_launch = [*parts[first : first + num_remote]]
            of_launch += [Part(0, 0, 0)] * (num_remote - len(of_launch))
            if call := gather_rows(launcher, rows, size, of_launch):
                yield call

    def _launch(self, gathers: Sequence[KernelCall], stream: torch.cuda.Stream, *, is_shared: bool) -> None:
        launcher = self._context.launcher(stream)
        if is_shared:
            node_barrier(launcher)  # the slots of all carriers are free
        for call in gathers:
            call.launch(stream.cuda_stream)
        if is_shared:
            node_barrier(launcher)  # all rows are in the slots


class Packed(NamedTuple):
    """A slice of a rank."""

    gathers: Sequence[KernelCall]  # pack its rows
    sends: Sequence[Message]
    lane_bytes: int  # of rows that other ranks carry


def num_rows_per_slice(layout: DeviceLayout, traffic: InternodeTraffic, row_bytes: int) -> int:
    """Return the rows in a slice."""
    return traffic.fit(layout.rows_per_slice(row_bytes), layout.max_held_rows(row_bytes))


def forwarded_starts(arena: Arena, traffic: InternodeTraffic, sizes: Sequence[int]) -> list[int]:
    """Return the addresses of the payloads that this rank forwards."""
    offsets = (arena.layout.pool_offset(traffic.num_forwarded, [*sizes], p) for p in range(len(sizes)))
    return [arena.address(arena.local, offset) for offset in offsets]


class SliceRing:
    """Ring buffer in a rank's arena, which each call uses from the first slot on, with slices numbered from 0.

    Ranks of the node push rows into it that this rank carries for them.

    A call's stream waits for its last slice, and the next call comes after it on every stream. So nothing that an
    earlier call recorded is waited for, as a graph capture could not.
    """

    def __init__(self, network: Network, arena: Arena) -> None:
        self._network, self._arena = network, arena
        self._is_produced = network.gpu.new_event()
        self._is_free: list[torch.cuda.Event | None] = [None] * arena.layout.ring_depth

    def slot(self, number: int, stream: torch.cuda.Stream, dtype: torch.dtype) -> torch.Tensor:
        """Return the slot of a slice, as a row of ``dtype``; the stream waits until it is free."""
        place = number % len(self._is_free)
        if number >= len(self._is_free) and (is_free := self._is_free[place]):
            stream.wait_event(is_free)
        return self._arena.network_slots(dtype)[place]

    def exchange(
        self,
        number: int,
        sends: Sequence[Message],
        receives: Sequence[Message],
        what: str,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        timeline: Timeline | NoTimeline,
    ) -> torch.cuda.Event:
        """Send a slice after all work on its producer's stream, and receive; return the event of their completion.

        ``streams``: the producer's, and that of the messages; they may be the same.
        """
        producer, stream = streams
        if stream is not producer:
            self._is_produced.record(producer)  # made once: wait_stream would make an event for each slice
            stream.wait_event(self._is_produced)
        with timeline.span("network", what, stream):
            done = self._network.exchange(sends, receives, what, stream)
        self._is_free[number % len(self._is_free)] = done
        return done

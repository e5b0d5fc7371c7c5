"""The tasks of ``shuffle``, ``gather_send`` and ``scatter_recv``: byte streams of segments through channels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from fusco.engine.cpu.channel import GlooIn, GlooOut, Incoming, Outgoing, RingIn, RingOut, SendRing
from fusco.engine.cpu.node_memory import NodeMemory
from fusco.errors import Stall
from fusco.kernels.copy_segments import copy_segments
from fusco.segments import Segments
from fusco.transport.gloo import GlooTransport


class StreamOut:
    """Gathers segments slice by slice into a channel."""

    def __init__(self, segments: Segments, channel: Outgoing, dst: int, slice_bytes: int) -> None:
        self._segments, self._channel, self._dst = segments, channel, dst
        self._slices: Iterator[Segments] = segments.slices(slice_bytes)
        self._num_sent, self._num_slices = 0, -(-segments.total_bytes // slice_bytes)

    def step(self) -> bool:
        """Gather one slice if there is room."""
        slot = self._channel.slot() if self._num_sent < self._num_slices else None
        if slot is None:
            return False
        piece = next(self._slices)
        ends = piece.num_bytes.cumsum(0)
        copy_segments(piece.memory, piece.offset_bytes, slot, ends - piece.num_bytes, piece.num_bytes)
        self._channel.commit(int(ends[-1]))
        self._num_sent += 1
        return True

    @property
    def is_done(self) -> bool:
        """Whether the other side has everything."""
        return self._num_sent == self._num_slices and self._channel.is_drained

    def stall(self) -> Stall:
        """The other side does not take slices."""
        return Stall(
            "gathering and sending", (self._dst,), f"{self._num_slices} slices taken", f"{self._num_sent} sent"
        )


class StreamIn:
    """Scatters slices from a channel to segments."""

    def __init__(self, segments: Segments, channel: Incoming, src: int, slice_bytes: int) -> None:
        self._channel, self._src = channel, src
        self._slices = segments.slices(slice_bytes)
        self._num_taken, self._num_slices = 0, -(-segments.total_bytes // slice_bytes)

    def step(self) -> bool:
        """Scatter one slice if it is there."""
        message = self._channel.message() if self._num_taken < self._num_slices else None
        if message is None:
            return False
        piece = next(self._slices)
        starts = piece.num_bytes.cumsum(0) - piece.num_bytes
        copy_segments(message, starts, piece.memory, piece.offset_bytes, piece.num_bytes)
        self._channel.release()
        self._num_taken += 1
        return True

    @property
    def is_done(self) -> bool:
        """Whether every segment is filled."""
        return self._num_taken == self._num_slices

    def stall(self) -> Stall:
        """The other side does not send."""
        return Stall("receiving and scattering", (self._src,), f"{self._num_slices} slices", f"{self._num_taken}")


class Streams:
    """Makes the two ends of streams to and from any rank, over shared memory or gloo as the rank's node demands."""

    def __init__(self, memory: NodeMemory, transport: GlooTransport, private: torch.Tensor) -> None:
        """``private`` are the rank's slots outside shared memory (``ArenaLayout.num_private_slots``)."""
        self._memory, self._transport, self._private = memory, transport, private
        self._slice_bytes, self._depth = memory.layout.slot_bytes, memory.layout.settings.ring_depth
        self._send_ring = SendRing(transport, list(private[: self._depth]))

    def outgoing(self, segments: Segments, dst: int) -> StreamOut:
        """Segments to a rank."""
        channel: Outgoing = (
            RingOut(self._memory, self._memory.ranks.index(dst))
            if dst in self._memory.ranks
            else GlooOut(self._send_ring, dst)
        )
        return StreamOut(segments, channel, dst, self._slice_bytes)

    def incoming(self, segments: Segments, src: int) -> StreamIn:
        """Segments from a rank."""
        channel: Incoming
        if src in self._memory.ranks:
            channel = RingIn(self._memory, self._memory.ranks.index(src))
        else:
            remote = [r for r in range(self._memory.layout.topology.world_size) if r not in self._memory.ranks]
            first = self._depth + 2 * remote.index(src)
            sizes = slice_sizes(segments.total_bytes, self._slice_bytes)
            channel = GlooIn(self._transport, src, list(self._private[first : first + 2]), sizes)
        return StreamIn(segments, channel, src, self._slice_bytes)


def slice_sizes(total_bytes: int, slice_bytes: int) -> Iterator[int]:
    """Sizes of the slices of a stream.

    >>> list(slice_sizes(5, 2))
    [2, 2, 1]
    """
    whole, rest = divmod(total_bytes, slice_bytes)
    return itertools.chain(itertools.repeat(slice_bytes, whole), [rest] if rest else [])


def word(value: int) -> Segments:
    """One int64 as a payload."""
    return Segments(torch.tensor([value]), torch.tensor([0]), torch.tensor([8]))

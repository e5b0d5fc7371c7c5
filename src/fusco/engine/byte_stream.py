"""Byte streams of segments through channels: the tasks of ``shuffle``, ``gather_send`` and ``scatter_recv``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from fusco.core.errors import MismatchError, Stall
from fusco.core.segments import Segments
from fusco.engine.tasks import Task

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Outgoing(Protocol):
    """Sending end of a channel to one rank, or to several."""

    def slot(self) -> torch.Tensor | None:
        """Return a free slot for the next message, uint8 (slot_bytes,), or ``None`` if all are in use."""

    def commit(self, num_bytes: int, dst: int) -> None:
        """Send the first ``num_bytes`` of the slot to rank ``dst``."""

    @property
    def is_drained(self) -> bool:
        """True if everything has been taken, or has left this rank."""


class Incoming(Protocol):
    """Receiving end of a channel; messages come in the order of sending."""

    def message(self) -> torch.Tensor | None:
        """Return the oldest message, or ``None`` if it has not arrived yet; it is valid until ``release``."""

    def release(self) -> None:
        """Free the slot of the oldest message."""

    @property
    def is_released(self) -> bool:
        """True if the peer has seen every release."""


ChannelT = TypeVar("ChannelT")


class _SegmentTask(Generic[ChannelT]):
    """Slices of segments that are sent to a rank, or received from it, one after the other."""

    def __init__(self, segments: Segments, channel: ChannelT, peer: int, slice_bytes: int, copy: Copy) -> None:
        self._channel, self._peer, self._copy = channel, peer, copy
        self._memory, self._slices = segments.memory, segments.slices(slice_bytes)
        self._num_done, self._num_slices = 0, -(-segments.total_bytes // slice_bytes)


class SegmentSender(_SegmentTask[Outgoing]):
    """Task that gathers segments slice by slice into a channel."""

    def step(self) -> bool:
        slot = self._channel.slot() if self._num_done < self._num_slices else None
        if slot is None:
            return False
        piece = next(self._slices)
        self._copy(self._memory, piece.offset_bytes, slot, piece.packed_offset_bytes, piece.num_bytes)
        self._channel.commit(piece.total_bytes, self._peer)
        self._num_done += 1
        return True

    @property
    def is_done(self) -> bool:
        return self._num_done == self._num_slices and self._channel.is_drained

    def stall(self) -> Stall:
        expected, seen = f"{self._num_slices} slices taken", f"{self._num_done} sent"
        return Stall("gathering and sending", (self._peer,), expected, seen)


class SegmentReceiver(_SegmentTask[Incoming]):
    """Task that scatters slices from a channel to segments."""

    def step(self) -> bool:
        message = self._channel.message() if self._num_done < self._num_slices else None
        if message is None:
            return False
        piece = next(self._slices)
        self._copy(message, piece.packed_offset_bytes, self._memory, piece.offset_bytes, piece.num_bytes)
        self._channel.release()
        self._num_done += 1
        return True

    @property
    def is_done(self) -> bool:
        return self._num_done == self._num_slices and self._channel.is_released

    def stall(self) -> Stall:
        return Stall("receiving and scattering", (self._peer,), f"{self._num_slices} slices", f"{self._num_done}")


class SegmentChannels(Protocol):
    """Factory of the tasks of byte streams to and from other ranks, for one collective."""

    device: torch.device

    def tasks(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> list[Task]:
        """Return tasks that send segments to some ranks and receive segments from some."""


def in_turn(rank: int, partners: Mapping[int, Segments]) -> list[tuple[int, Segments]]:
    """Sort partners, the next rank first, so that receivers take turns.

    >>> nothing = Segments(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    >>> [peer for peer, _ in in_turn(1, {0: nothing, 1: nothing, 2: nothing})]
    [1, 2, 0]
    """
    return sorted(partners.items(), key=lambda entry: (entry[0] < rank, entry[0]))


def run_stream(
    streams: SegmentChannels,
    name: str,
    send: Mapping[int, Segments],
    receive: Mapping[int, Segments],
    run: Callable[[Sequence[Task]], None],
) -> None:
    """Send segments to one rank, or receive from one: both sides first exchange what they do, and how many bytes.

    ``run`` runs tasks, ``name`` is for the ``MismatchError`` that both raise if both send, both receive, or the numbers
    differ.
    """
    ((peer, segments),) = (*send.items(), *receive.items())
    num_bytes = segments.total_bytes
    # A receiver's number is inverted, and so negative.
    ours, theirs = int64_segment(num_bytes if send else ~num_bytes, streams.device), int64_segment(0, streams.device)
    run(streams.tasks({peer: ours}, {peer: theirs}))
    of_peer = int(theirs.base[0])
    if (of_peer >= 0) is bool(send):
        raise MismatchError(f"{name}: rank {peer} calls {'gather_send' if send else 'scatter_recv'}, too")
    if max(of_peer, ~of_peer) != num_bytes:
        raise MismatchError(
            f"{name}: this rank has {num_bytes} bytes of segments, rank {peer} has {max(of_peer, ~of_peer)} bytes"
        )
    run(streams.tasks(send, receive))


def int64_segment(value: int, device: torch.device) -> Segments:
    """Make segments of one int64."""
    first, size = torch.tensor([0], device="cpu"), torch.tensor([8], device="cpu")
    return Segments(torch.tensor([value], device=device), first, size)

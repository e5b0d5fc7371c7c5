"""Byte streams to and from any rank: over shared memory within a node, over TCP between nodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusco.core.segments import Segments
from fusco.cpu.channel import RingIn, RingOut, SendRing, TcpIn
from fusco.cpu.kernels.copy_segments import copy_segments
from fusco.cpu.memory import CpuMemory
from fusco.cpu.transport import Transport
from fusco.engine.byte_stream import Incoming, Outgoing, SegmentReceiver, SegmentSender, in_turn
from fusco.engine.tasks import Task


class CpuSegmentChannels:
    """Factory of the tasks of streams: over shared memory within a node, over TCP between nodes."""

    def __init__(self, memory: CpuMemory, transport: Transport, private: torch.Tensor) -> None:
        """``private`` are the rank's slots outside shared memory (``CpuLayout.num_private_slots``)."""
        self.device = torch.device("cpu")
        self._memory, self._transport, self._private = memory, transport, private
        self._slice_bytes, self._depth = memory.layout.slot_bytes, memory.layout.settings.ring_depth
        self._send_ring = SendRing(transport, list(private[: self._depth]))

    def tasks(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> list[Task]:
        rank = self._memory.rank
        tasks: list[Task] = [self._outgoing(segments, dst) for dst, segments in in_turn(rank, send)]
        return tasks + [self._incoming(segments, src) for src, segments in in_turn(rank, receive)]

    def _outgoing(self, segments: Segments, dst: int) -> SegmentSender:
        ranks = self._memory.ranks
        channel: Outgoing = RingOut(self._memory, ranks.index(dst)) if dst in ranks else self._send_ring
        return SegmentSender(segments, channel, dst, self._slice_bytes, copy_segments)

    def _incoming(self, segments: Segments, src: int) -> SegmentReceiver:
        channel: Incoming
        if src in self._memory.ranks:
            channel = RingIn(self._memory, self._memory.ranks.index(src))
        else:
            remote = [r for r in range(self._memory.layout.topology.world_size) if r not in self._memory.ranks]
            first = self._depth + 2 * remote.index(src)
            total, size = segments.total_bytes, self._slice_bytes
            sizes = (min(size, total - begin) for begin in range(0, total, size))
            channel = TcpIn(self._transport, src, list(self._private[first : first + 2]), sizes)
        return SegmentReceiver(segments, channel, src, self._slice_bytes, copy_segments)

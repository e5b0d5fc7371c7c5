"""``all_to_all`` on CUDA: rounds of NCCL messages, each a stage between nodes and the redistribution of the previous.

In the first round the ranks of a node balance what they send. Then each stage is sent between nodes while the data of
the previous stage is redistributed within the node, over NVLink; both are NCCL messages (FAST, Fig. 11). All rounds run
in order on the network's stream, so no flags are needed. ``shuffle`` with lanes is the same: a message is gathered
directly from the segments where it begins, and scattered to those where it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fusco.core.errors import Stall
from fusco.core.lanes import IntArray
from fusco.core.profile import CallProfile
from fusco.core.segments import Segments
from fusco.cuda.between_nodes.network import Network, messages_of
from fusco.cuda.byte_streams import Copy
from fusco.engine.all_to_all import FlowSlice, MemorySpan, cut_flow
from fusco.schedule.rank_schedule import INPUT, NUM_BYTES, NUM_MEMORIES, OFFSET, OUTPUT, Flow, RankSchedule


class SegmentMemory:
    """Segments of several tensors as one memory of bytes, in their order."""

    def __init__(self, parts: Sequence[Segments]) -> None:
        self.parts = parts
        found = [part.descriptors for part in parts]
        none = np.zeros(0, np.int64)
        num_bytes = np.concatenate([none, *(of.num_bytes.numpy() for of in found)])
        self._offset = np.concatenate([none, *(of.offset_bytes.numpy() for of in found)])
        self._part = np.repeat(np.arange(len(parts)), [len(of.num_bytes) for of in found])
        self._end = num_bytes.cumsum()
        self._begin = self._end - num_bytes

    def pieces(self, first: int, num_bytes: int) -> IntArray:
        """Return where bytes from ``first`` on are, int64 (num_pieces, 3): index in ``parts``, offset there, size.

        >>> def segments(*sizes):
        ...     return Segments(torch.empty(9, dtype=torch.uint8), torch.arange(len(sizes)) * 4, torch.tensor(sizes))
        >>> SegmentMemory([segments(2, 3), segments(4)]).pieces(first=1, num_bytes=6).tolist()
        [[0, 1, 1], [0, 4, 3], [1, 0, 2]]
        """
        end = first + num_bytes
        of = slice(np.searchsorted(self._end, first, side="right"), np.searchsorted(self._end, end) + 1)
        begin = np.maximum(self._begin[of], first)
        size = np.minimum(self._end[of], end) - begin
        return np.stack([self._part[of], self._offset[of] + begin - self._begin[of], size], axis=1)


ByteMemory = torch.Tensor | SegmentMemory  # a tensor is uint8


class MessageRounds:
    """Runs the rank schedule of one call."""

    def __init__(
        self,
        rank_schedule: RankSchedule,
        ends: Sequence[ByteMemory],
        network: Network,
        copy: Copy,
        device: torch.device,
    ) -> None:
        """``ends`` are input and output, in the sizes of the rank schedule. ``copy`` uses the network's stream."""
        self._rank_schedule, self._network, self._copy, self._device = rank_schedule, network, copy, device
        self._memories: list[ByteMemory] = [*ends, *map(self._room, rank_schedule.spare_bytes)]

    def run(self, profile: CallProfile) -> torch.cuda.Event:
        """Launch everything on the network's stream, which is the current one; return the event of its end."""
        self._copy_own()
        plan = self._rank_schedule
        sends = [*plan.sends_across, *(flow for flows in plan.sends_within.values() for flow in flows)]
        receives = [*plan.receives_across, *(flow for flows in plan.receives_within.values() for flow in flows)]
        # Both ends have a flow in the same round, and in the same order among the flows of their pair.
        for number in sorted({self._round_of(flow) for flow in (*sends, *receives)}):
            outgoing = [flow for flow in sends if self._round_of(flow) == number]
            incoming = [flow for flow in receives if self._round_of(flow) == number]
            self._exchange(outgoing, incoming, f"round {number} of an all-to-all")
        profile.internode_row_bytes += sum(flow.total_bytes for flow in plan.sends_across)
        profile.intranode_row_bytes += sum(
            flow.total_bytes for flows in plan.receives_within.values() for flow in flows
        )
        return self._network.stream.record_event()

    def _round_of(self, flow: Flow) -> int:
        """Return 0 for flows of no stage; else a stage's round, where redistribution runs with the next stage."""
        if flow.stage < 0:
            return 0
        is_within = flow.peer in self._rank_schedule.sends_within
        return flow.stage + (2 if is_within else 1)

    def _copy_own(self) -> None:
        from_, to = self._memories[INPUT], self._memories[OUTPUT]
        if isinstance(from_, SegmentMemory) or isinstance(to, SegmentMemory):
            return  # segments for this rank itself are no part of a schedule
        source, target = (pieces[0].tolist() for pieces in self._rank_schedule.own)
        own = from_[source[OFFSET] :][: source[NUM_BYTES]]
        to[target[OFFSET] :][: target[NUM_BYTES]].copy_(own)

    def _exchange(self, sends: Sequence[Flow], receives: Sequence[Flow], what: str) -> None:
        outgoing = [(flow.peer, self._gathered(message)) for flow in sends for message in _whole(flow)]
        incoming = [(flow.peer, message, self._room_for(message)) for flow in receives for message in _whole(flow)]
        self._network.exchange(messages_of(outgoing), messages_of((peer, memory) for peer, _, memory in incoming), what)
        for _, message, memory in incoming:
            if self._in_place(message) is None:
                for place, offset, first, num_bytes in self._places(message):
                    self._copy(memory, first, place, offset, num_bytes)

    def _gathered(self, message: FlowSlice) -> torch.Tensor:
        """Return the bytes of a message in one piece; a view where they are contiguous."""
        memory = self._room_for(message)
        if self._in_place(message) is None:
            for place, offset, first, num_bytes in self._places(message):
                self._copy(place, offset, memory, first, num_bytes)
        return memory

    def _room_for(self, message: FlowSlice) -> torch.Tensor:
        """Return a view of a contiguous message, else new memory for it."""
        place = self._in_place(message)
        return self._room(message.num_bytes) if place is None else place

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _in_place(self, message: FlowSlice) -> torch.Tensor | None:
        """Return the memory of a message if it is one span of a tensor."""
        span = message.spans[0]
        memory = self._memories[span.memory]
        if len(message.spans) > 1 or isinstance(memory, SegmentMemory):
            return None
        return memory[span.offset : span.end]

    def _places(self, message: FlowSlice) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each tensor that has bytes of a message: offsets in it, offsets in the message, and sizes."""
        table = torch.from_numpy(np.concatenate([self._pieces(span) for span in message.spans]))
        of_tensor, offset, num_bytes = table.unbind(1)
        first = num_bytes.cumsum(0) - num_bytes
        for number in of_tensor.unique().tolist():
            part, i = divmod(number, NUM_MEMORIES)
            memory, is_there = self._memories[i], of_tensor == number
            place = memory.parts[part].memory if isinstance(memory, SegmentMemory) else memory
            yield place, offset[is_there], first[is_there], num_bytes[is_there]

    def _pieces(self, span: MemorySpan) -> IntArray:
        """Return the pieces of a span, int64 (num_pieces, 3): number of the tensor, offset in it, and size."""
        memory = self._memories[span.memory]
        if not isinstance(memory, SegmentMemory):
            return np.array([(span.memory, span.offset, span.num_bytes)])
        pieces = memory.pieces(span.offset, span.num_bytes)
        pieces[:, 0] = pieces[:, 0] * NUM_MEMORIES + span.memory
        return pieces


class Arrival:
    """Task that waits on the host for the end of a schedule that has been launched."""

    def __init__(self, done: torch.cuda.Event, rank_schedule: RankSchedule) -> None:
        self._done, plan = done, rank_schedule
        flows = (plan.sends_across, plan.receives_across, *plan.sends_within.values(), *plan.receives_within.values())
        self._peers = tuple(sorted({flow.peer for of_list in flows for flow in of_list}))

    def step(self) -> bool:
        """Return False: the device does everything."""
        return False

    @property
    def is_done(self) -> bool:
        """True once everything has been sent and has arrived."""
        return bool(self._done.query())

    def stall(self) -> Stall:
        """A peer does not send, or does not receive."""
        return Stall("exchanging segments between nodes", self._peers, "all of them", "not all")


def _whole(flow: Flow) -> list[FlowSlice]:
    """Return a flow as one message, or none if it is empty."""
    return list(cut_flow(flow, flow.total_bytes)) if flow.total_bytes else []

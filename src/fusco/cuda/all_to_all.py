"""``all_to_all`` on CUDA: rounds of NCCL messages, each a stage between nodes and the redistribution of the previous.

In the first round the ranks of a node balance what they send. Then each stage is sent between nodes while the data of
the previous stage is redistributed within the node, over NVLink; both are NCCL messages (FAST, Fig. 11). All rounds run
in order on the network's stream, so no flags are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.profile import CallProfile
from fusco.cuda.network import Network, messages_of
from fusco.engine.all_to_all import FlowSlice, cut_flow
from fusco.engine.byte_stream import Copy
from fusco.schedule.rank_schedule import INPUT, NUM_BYTES, OFFSET, OUTPUT, Flow, RankSchedule


class MessageRounds:
    """Runs the rank schedule of one call."""

    def __init__(
        self, rank_schedule: RankSchedule, memories: Sequence[torch.Tensor], network: Network, copy: Copy
    ) -> None:
        """``memories`` are uint8, in the sizes and order of the rank schedule. ``copy`` uses the network's stream."""
        self._rank_schedule, self._memories, self._network, self._copy = rank_schedule, memories, network, copy

    def run(self, profile: CallProfile) -> None:
        """Launch everything on the network's stream, which is the current one."""
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

    def _round_of(self, flow: Flow) -> int:
        """Return 0 for flows of no stage; else a stage's round, where redistribution runs with the next stage."""
        if flow.stage < 0:
            return 0
        is_within = flow.peer in self._rank_schedule.sends_within
        return flow.stage + (2 if is_within else 1)

    def _copy_own(self) -> None:
        source, target = (pieces[0].tolist() for pieces in self._rank_schedule.own)
        own = self._memories[INPUT][source[OFFSET] :][: source[NUM_BYTES]]
        self._memories[OUTPUT][target[OFFSET] :][: target[NUM_BYTES]].copy_(own)

    def _exchange(self, sends: Sequence[Flow], receives: Sequence[Flow], what: str) -> None:
        outgoing = [(flow.peer, self._gathered(message)) for flow in sends for message in _whole(flow)]
        incoming = [(flow.peer, message, self._room_for(message)) for flow in receives for message in _whole(flow)]
        self._network.exchange(messages_of(outgoing), messages_of((peer, memory) for peer, _, memory in incoming), what)
        for _, message, memory in incoming:
            self._scatter(memory, message)

    def _gathered(self, message: FlowSlice) -> torch.Tensor:
        """Return the bytes of a message in one piece; a view where they are contiguous."""
        memory = self._room_for(message)
        if len(message.spans) > 1:
            for i, offset, first, num_bytes in _by_memory(message):
                self._copy(self._memories[i], offset, memory, first, num_bytes)
        return memory

    def _scatter(self, memory: torch.Tensor, message: FlowSlice) -> None:
        if len(message.spans) > 1:
            for i, offset, first, num_bytes in _by_memory(message):
                self._copy(memory, first, self._memories[i], offset, num_bytes)

    def _room_for(self, message: FlowSlice) -> torch.Tensor:
        """Return a view of a contiguous message, else new memory for it."""
        if len(message.spans) == 1:
            i, offset, num_bytes, _ = message.spans[0]
            return self._memories[i][offset : offset + num_bytes]
        return self._memories[INPUT].new_empty(message.num_bytes)


def _whole(flow: Flow) -> list[FlowSlice]:
    """Return a flow as one message, or none if it is empty."""
    return list(cut_flow(flow, flow.total_bytes)) if flow.total_bytes else []


def _by_memory(message: FlowSlice) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the spans of each memory: its index, offsets in it, offsets in the message, and sizes."""
    table = torch.tensor(message.spans, dtype=torch.int64, device="cpu")
    memory, offset, num_bytes = table[:, 0], table[:, 1], table[:, 2]
    first = num_bytes.cumsum(0) - num_bytes
    return [
        (int(i), offset[memory == i].clone(), first[memory == i].clone(), num_bytes[memory == i].clone())
        for i in memory.unique()
    ]

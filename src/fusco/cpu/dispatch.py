"""Tasks of dispatch: gather and send slices, receive slices, scatter rows to their slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.cpu.channel import SendRing
from fusco.cpu.kernels.copy_segments import copy_segments
from fusco.cpu.kernels.scatter_slices import SourceRows, scatter_slices
from fusco.cpu.memory import CpuMemory
from fusco.cpu.plan import CpuPlan
from fusco.cpu.transport import Ticket, Transport
from fusco.planner.sending import SendingStage, order_of_slices


@dataclass(frozen=True)
class RowSlice:
    """Rows ``first`` to ``end`` of those that one rank sends to one node."""

    first: int
    end: int


def row_slices(num_rows: int, rows_per_slice: int) -> list[RowSlice]:
    """Cut rows into slices; the last one may be shorter.

    >>> [(piece.first, piece.end) for piece in row_slices(5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return [RowSlice(first, min(first + rows_per_slice, num_rows)) for first in range(0, num_rows, rows_per_slice)]


class SendRows:
    """Task that gathers rows for other nodes, slice by slice, while earlier slices are on the network."""

    def __init__(self, plan: CpuPlan, memory: CpuMemory, ring: SendRing, row_bytes: int, profile: CallProfile) -> None:
        self._memory, self._ring, self._row_bytes, self._profile = memory, ring, row_bytes, profile
        rows_per_slice = memory.layout.rows_per_slot(row_bytes)
        per_node: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for node, forwarder in plan.forwarders.destinations:
            offsets = memory.pool_offset(memory.node) + plan.forwarding.node_to_tokens[node] * row_bytes
            slices = row_slices(len(offsets), rows_per_slice)
            per_node[node] = [(forwarder, offsets[piece.first : piece.end]) for piece in slices]
        self._todo = _staged(per_node, plan.sending_stages) if plan.sending_stages else _in_turn(per_node)
        self._slot_offsets = torch.arange(rows_per_slice, device="cpu") * row_bytes
        self._sizes = torch.full((rows_per_slice,), row_bytes, device="cpu")
        self._num_sent = 0

    def step(self) -> bool:
        """Gather and send one slice if a slot is free."""
        slot = self._ring.slot()
        if slot is None or self._num_sent == len(self._todo):
            return False
        forwarder, offsets = self._todo[self._num_sent]
        n = len(offsets)
        copy_segments(self._memory.bytes[self._memory.local], offsets, slot, self._slot_offsets[:n], self._sizes[:n])
        self._ring.commit(n * self._row_bytes, forwarder)
        self._profile.internode_row_bytes += n * self._row_bytes
        self._num_sent += 1
        return True

    @property
    def is_done(self) -> bool:
        """True if every slice has been sent."""
        return self._num_sent == len(self._todo) and self._ring.is_drained

    def stall(self) -> Stall:
        """Describe the wait for forwarders to take slices."""
        forwarders = tuple(dict.fromkeys(forwarder for forwarder, _ in self._todo))
        return Stall("sending rows", forwarders, f"{len(self._todo)} slices taken", f"{self._num_sent} sent")


class ReceiveRows:
    """Task that receives slices directly into the pool and announces them to the node."""

    def __init__(
        self,
        memory: CpuMemory,
        transport: Transport,
        collective: int,
        src_to_rows: dict[int, int],
        row_bytes: int,
        rows_per_slice: int,
    ) -> None:
        """``src_to_rows[r]`` rows of ``row_bytes`` come from rank ``r``, from at most one rank of each node."""
        self._tickets: dict[int, list[Ticket]] = {}
        layout = memory.layout
        for src, num_rows in src_to_rows.items():
            node = layout.topology.rank_to_node[src]
            rows = memory.pool(memory.local, node, (num_rows, row_bytes), torch.uint8)
            announce = _announcer(memory, layout.arrival_flag(node), collective)
            self._tickets[src] = [
                transport.receive(rows[piece.first : piece.end], src, on_done=announce)
                for piece in row_slices(num_rows, rows_per_slice)
            ]
        self._num_arrived = 0

    def num_arrived(self, src: int) -> int:
        """Return the number of slices from ``src`` that have arrived."""
        return sum(ticket.is_done for ticket in self._tickets[src])

    def step(self) -> bool:
        """Count the slices that have arrived; the transport does the work."""
        before, self._num_arrived = self._num_arrived, sum(map(self.num_arrived, self._tickets))
        return self._num_arrived > before

    @property
    def is_done(self) -> bool:
        """True if every slice has arrived."""
        return all(ticket.is_done for tickets in self._tickets.values() for ticket in tickets)

    def stall(self) -> Stall:
        """Describe the wait for sources to send."""
        missing = {src: len(tickets) - self.num_arrived(src) for src, tickets in self._tickets.items()}
        late = tuple(src for src, count in missing.items() if count)
        total = sum(map(len, self._tickets.values()))
        return Stall("receiving rows", late, f"{total} slices", f"{self._num_arrived}")


class ScatterRows:
    """Task that reads every row for this rank once, from its pool, and writes it to all its slots."""

    def __init__(
        self,
        plan: CpuPlan,
        memory: CpuMemory,
        collective: int,
        outputs: Sequence[torch.Tensor],
        row_bytes: int,
        profile: CallProfile,
    ) -> None:
        """``outputs`` are the expert-major rows of each payload as bytes, uint8 (num_slots, payload_bytes)."""
        self._plan, self._memory, self._profile, self._row_bytes = plan, memory, profile, row_bytes
        self._sources = _local_node_first(plan)
        self._num_done = np.zeros(len(self._sources), np.int64)
        sizes = [output.shape[1] for output in outputs]
        places = [
            (output.data_ptr(), size, end - size)
            for output, size, end in zip(outputs, sizes, accumulate(sizes), strict=True)
        ]
        self._outputs, self._payloads = np.array(places, np.int64), outputs  # which keeps their memory
        self._rows_per_slice = memory.layout.rows_per_slot(row_bytes)
        self._rows = self._source_rows(collective)
        self._num_left = len(self._sources)

    def step(self) -> bool:
        """Scatter about one slice of what is there."""
        plan = self._plan
        scattered = scatter_slices(
            self._rows,
            self._num_done,
            plan.distribution.pair_to_slot,
            plan.pairs.row_to_first_pair,
            self._outputs,
            self._row_bytes,
            self._rows_per_slice,
        )
        self._num_left = scattered.num_sources_left
        self._profile.intranode_row_bytes += scattered.num_peer_rows * self._row_bytes
        return scattered.num_rows > 0

    @property
    def is_done(self) -> bool:
        """True if every slot is filled."""
        return not self._num_left

    def stall(self) -> Stall:
        """Describe the wait for rows in the pools of this node."""
        is_late = (self._num_done < self._rows[:, SourceRows._fields.index("num_rows")]).tolist()
        waiting = [src for src, late in zip(self._sources, is_late, strict=True) if late]
        ranks = dict.fromkeys(waiting + [self._plan.src_to_holder[src] for src in waiting])
        ranks.pop(self._memory.rank, None)
        expected = sum(map(self._plan.num_rows_from, waiting))
        seen = int(self._num_done[is_late].sum())
        return Stall("scattering rows", tuple(ranks), f"{expected} rows in the pools of this node", f"{seen}")

    def _source_rows(self, collective: int) -> npt.NDArray[np.int64]:
        """Return a ``SourceRows`` for each source."""
        plan, memory, layout = self._plan, self._memory, self._memory.layout
        src = np.array(self._sources)
        first_row = np.array(plan.routing.src_to_first_row)
        node, num_rows = memory.nodes[src], np.diff(first_row)[src]
        local = memory.locals[np.array(plan.src_to_holder)[src]]
        is_local = node == memory.node
        fields = SourceRows(
            flag=memory.rows_flags[local, node],
            before=np.where(is_local, collective - 1, layout.tag(collective, 0)),
            rows_per_step=np.where(is_local, num_rows, self._rows_per_slice),
            pool=memory.pools[local, node],
            first_row=first_row[src],
            num_rows=num_rows,
            is_of_peer=local != memory.local,
        )
        return np.stack(fields, axis=1)


def _announcer(memory: CpuMemory, flag: int, collective: int) -> Callable[[], None]:
    """Return a callback for each slice that arrives from a source: it increments the source's flag."""
    arrived = itertools.count(1)
    return lambda: memory.own.store(flag, memory.layout.tag(collective, next(arrived)))


def _local_node_first(plan: CpuPlan) -> list[int]:
    """Return all source ranks, those of this node first: their rows do not wait for the network."""
    nodes, local_node = plan.topology.rank_to_node, plan.node
    return sorted(range(len(nodes)), key=lambda src: nodes[src] != local_node)


def _in_turn(per_node: Mapping[int, list[tuple[int, torch.Tensor]]]) -> list[tuple[int, torch.Tensor]]:
    """Interleave the slices: one for each node, then the next for each."""
    longest = max(map(len, per_node.values()), default=0)
    return [slices[i] for i in range(longest) for slices in per_node.values() if i < len(slices)]


def _staged(
    per_node: Mapping[int, list[tuple[int, torch.Tensor]]], stages: Sequence[SendingStage]
) -> list[tuple[int, torch.Tensor]]:
    """Sort the slices in the order of the stages."""
    slices = {node: iter(of_node) for node, of_node in per_node.items()}
    return [next(slices[node]) for node in order_of_slices({n: len(s) for n, s in per_node.items()}, stages)]

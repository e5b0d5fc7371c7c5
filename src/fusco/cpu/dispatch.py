"""Tasks of dispatch: gather and send slices, receive slices, scatter rows to their slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.cpu.channel import SendRing
from fusco.cpu.gloo import GlooTransport, Ticket
from fusco.cpu.kernels.copy_segments import copy_segments
from fusco.cpu.memory import CpuMemory
from fusco.planner.dispatch_plan import DispatchPlan
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

    def __init__(
        self, plan: DispatchPlan, memory: CpuMemory, ring: SendRing, row_bytes: int, profile: CallProfile
    ) -> None:
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
        transport: GlooTransport,
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
        plan: DispatchPlan,
        memory: CpuMemory,
        collective: int,
        outputs: Sequence[torch.Tensor],
        row_bytes: int,
        profile: CallProfile,
    ) -> None:
        """``outputs`` are the expert-major rows of each payload as bytes, uint8 (num_slots, payload_bytes)."""
        self._memory, self._collective, self._profile = memory, collective, profile
        self._outputs = [(output.view(-1), output.shape[1]) for output in outputs]
        self._row_bytes = row_bytes
        self._slots = plan.distribution.pair_to_slot
        rows_per_slice = memory.layout.rows_per_slot(row_bytes)
        self._sources = [_SourceRows(plan, memory, src, rows_per_slice, row_bytes) for src in _local_node_first(plan)]

    def step(self) -> bool:
        """Scatter one slice of the first source that has one."""
        for source in self._sources:
            if source.num_done < len(source.slices) and self._num_available(source) > source.num_done:
                self._scatter(source)
                return True
        return False

    @property
    def is_done(self) -> bool:
        """True if every slot is filled."""
        return all(source.num_done == len(source.slices) for source in self._sources)

    def stall(self) -> Stall:
        """Describe the wait for rows in the pools of this node."""
        waiting = [source for source in self._sources if source.num_done < len(source.slices)]
        ranks = dict.fromkeys([source.src for source in waiting] + [source.holder for source in waiting])
        ranks.pop(self._memory.rank, None)
        expected = f"{sum(len(source.slices) for source in waiting)} slices in the pools of this node"
        return Stall("scattering rows", tuple(ranks), expected, f"{sum(source.num_done for source in waiting)}")

    def _num_available(self, source: _SourceRows) -> int:
        flags, layout = self._memory.flags[source.local], self._memory.layout
        if source.node == self._memory.node:
            is_staged = flags.load(layout.rows_flag) >= self._collective
            return len(source.slices) if is_staged else 0
        arrived = flags.load(layout.arrival_flag(source.node)) - layout.tag(self._collective, 0)
        return max(0, arrived)

    def _scatter(self, source: _SourceRows) -> None:
        first, end = source.slices[source.num_done]
        source.num_done += 1
        offsets = source.pair_offsets[first - source.first_pair : end - source.first_pair]
        column = 0
        for output, num_bytes in self._outputs:
            copy_segments(
                self._memory.bytes[source.local],
                offsets + column if column else offsets,
                output,
                self._slots[first:end] * num_bytes,
                torch.full_like(offsets, num_bytes),
            )
            column += num_bytes
        if source.local != self._memory.local:
            self._profile.intranode_row_bytes += _num_distinct(offsets) * self._row_bytes


class _SourceRows:
    """Rows of one source rank on this node, and their pairs on this rank, slice by slice."""

    def __init__(self, plan: DispatchPlan, memory: CpuMemory, src: int, rows_per_slice: int, row_bytes: int) -> None:
        topology = plan.topology
        self.src, self.node, self.holder = src, topology.rank_to_node[src], plan.src_to_holder[src]
        self.local = topology.rank_to_local[self.holder]
        first_row = plan.routing.src_to_first_row[src]
        pieces = row_slices(plan.num_rows_from(src), rows_per_slice)
        bounds = torch.tensor([first_row, *(first_row + piece.end for piece in pieces)], device="cpu")
        pairs = plan.row_to_first_pair[bounds].tolist()
        self.slices = list(itertools.pairwise(pairs))
        self.first_pair = pairs[0]
        rows = plan.distribution.pair_to_row[pairs[0] : pairs[-1]] - first_row
        self.pair_offsets = memory.pool_offset(self.node) + rows * row_bytes
        self.num_done = 0


def _announcer(memory: CpuMemory, flag: int, collective: int) -> Callable[[], None]:
    """Return a callback for each slice that arrives from a source: it increments the source's flag."""
    arrived = itertools.count(1)
    return lambda: memory.own.store(flag, memory.layout.tag(collective, next(arrived)))


def _num_distinct(ascending: torch.Tensor) -> int:
    return int((ascending.diff() != 0).sum()) + (len(ascending) > 0)


def _local_node_first(plan: DispatchPlan) -> list[int]:
    """Return all source ranks, those of this node first: their rows do not wait for the network."""
    nodes = plan.topology.rank_to_node
    return sorted(range(len(nodes)), key=lambda src: (nodes[src] != plan.node, src))


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

"""Tasks of combine: sum rows on the ranks of their experts, then at the holder of the row, then at the token's rank.

All sums are in float32 (float64 for float64 rows). Their order depends on ranks and nodes only: for each token, over k
on each rank, then over the ranks of each node, then this node and the other nodes, ascending. One row for each token
and node is sent between nodes, in the wire dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.core.rows import accumulation_dtype
from fusco.cpu.channel import RingIn, RingOut, SendRing
from fusco.cpu.dispatch import ReceiveRows, row_slices
from fusco.cpu.kernels.add_rows import add_rows
from fusco.cpu.kernels.reduce_rows import reduce_rows
from fusco.cpu.memory import CpuMemory
from fusco.planner.dispatch_plan import DispatchPlan


class PartialSums:
    """Sums over the local experts of one rank, for any range of the node's rows."""

    def __init__(self, plan: DispatchPlan, rows: torch.Tensor, pair_weights: torch.Tensor | None) -> None:
        self._rows = rows
        self.hidden, self.dtype = rows.shape[1], accumulation_dtype(rows.dtype)
        self._pair_to_slot = plan.distribution.pair_to_slot
        self._weights = (
            torch.ones(len(self._pair_to_slot), dtype=self.dtype, device="cpu")
            if pair_weights is None
            else pair_weights.to(self.dtype)
        )
        first_pair = plan.row_to_first_pair
        # By the routing, since the token's rank uses it, too: static rows may have dropped all pairs of a row.
        is_touched = plan.row_to_locals[:, plan.topology.rank_to_local[plan.rank]]
        self._touched_rows = is_touched.nonzero().squeeze(1)
        self._first_pair = torch.cat([first_pair[self._touched_rows], first_pair[-1:]])

    def range_of(self, first_row: int, end_row: int) -> tuple[int, int]:
        """Return the range of this rank's sums in rows ``first_row`` to ``end_row`` of the node's routing."""
        first, end = torch.searchsorted(self._touched_rows, torch.tensor([first_row, end_row], device="cpu")).tolist()
        return first, end

    def write(self, first: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Compute sums ``first`` to ``end`` into the first bytes of ``memory`` (uint8); returns them as a matrix."""
        sums = as_rows(memory, end - first, self.hidden, self.dtype)
        reduce_rows(self._rows, self._first_pair[first : end + 1], self._pair_to_slot, self._weights, sums)
        return sums


def as_rows(memory: torch.Tensor, num_rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """View the first bytes of ``memory`` as a matrix."""
    return memory[: num_rows * hidden * dtype.itemsize].view(dtype).view(num_rows, hidden)


@dataclass(frozen=True)
class RowChunk:
    """Rows ``first`` to ``end`` of the node's routing, all of one source, summed and sent together."""

    src: int
    first: int
    end: int


def chunks_held_by(plan: DispatchPlan, rank: int, rows_per_chunk: int) -> list[RowChunk]:
    """Return the chunks that a rank of the node sums, in order: forwarded rows first, since they need the network."""
    first_row = plan.routing.src_to_first_row
    return [
        RowChunk(src, first_row[src] + piece.first, first_row[src] + piece.end)
        for src in plan.sources_held_by(rank)
        for piece in row_slices(plan.num_rows_from(src), rows_per_chunk)
    ]


class ProducePartialSums:
    """Task that computes the partial sums for other ranks of the node, into their rings."""

    def __init__(self, plan: DispatchPlan, memory: CpuMemory, partials: PartialSums, rows_per_chunk: int) -> None:
        self._partials = partials
        self._todo: dict[int, list[tuple[int, int]]] = {}
        self._rings: dict[int, RingOut] = {}
        self._ranks = memory.ranks
        num_locals = len(memory.ranks)
        for step in range(1, num_locals):  # so that producers start with different consumers
            consumer = (memory.local + step) % num_locals
            chunks = chunks_held_by(plan, memory.ranks[consumer], rows_per_chunk)
            ranges = [partials.range_of(chunk.first, chunk.end) for chunk in chunks]
            self._todo[consumer] = [(first, end) for first, end in ranges if first < end][::-1]
            self._rings[consumer] = RingOut(memory, consumer)

    def step(self) -> bool:
        """Produce one chunk for each consumer with a free slot."""
        moved = False
        for consumer, todo in self._todo.items():
            slot = self._rings[consumer].slot() if todo else None
            if slot is not None:
                sums = self._partials.write(*todo.pop(), slot)
                self._rings[consumer].commit(sums.nbytes)
                moved = True
        return moved

    @property
    def is_done(self) -> bool:
        """True if everything is produced."""
        return not any(self._todo.values())

    def stall(self) -> Stall:
        """Describe the wait for consumers to free slots."""
        waiting = {self._ranks[consumer]: len(todo) for consumer, todo in self._todo.items() if todo}
        return Stall("producing sums", tuple(waiting), "room in their rings", f"none, with {waiting} chunks to go")


class FoldSums:
    """Task that adds the partial sums of held rows: returns forwarded rows to their source, finishes local tokens."""

    def __init__(  # noqa: PLR0913  uses everything that combine moves
        self,
        *,
        plan: DispatchPlan,
        memory: CpuMemory,
        partials: PartialSums,
        returned: ReceiveRows,
        send_ring: SendRing,
        scratch: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        wire_dtype: torch.dtype,
        rows_per_chunk: int,
        profile: CallProfile,
    ) -> None:
        self._plan, self._memory, self._partials, self._profile = plan, memory, partials, profile
        self._returned, self._send_ring, self._scratch, self._out = returned, send_ring, scratch, out
        self._wire_dtype, self._rows_per_chunk = wire_dtype, rows_per_chunk
        self._chunks = chunks_held_by(plan, plan.rank, rows_per_chunk)
        self._rings = {q: RingIn(memory, q) for q in range(len(memory.ranks)) if q != memory.local}
        self._num_done = 0
        self._next_local = 0  # local rank whose partial sums the current chunk adds next

    def step(self) -> bool:
        """Advance the current chunk as far as possible."""
        if self._num_done == len(self._chunks):
            return False
        chunk = self._chunks[self._num_done]
        sums = as_rows(self._scratch[0], chunk.end - chunk.first, self._partials.hidden, self._partials.dtype)
        moved = self._add_partials(chunk, sums)
        if self._next_local < len(self._memory.ranks):
            return moved
        is_local = chunk.src == self._plan.rank
        if not (self._finish_local(chunk, sums) if is_local else self._send_back(chunk, sums)):
            return moved
        self._num_done += 1
        self._next_local = 0
        return True

    @property
    def is_done(self) -> bool:
        """True if every held row is summed and every forwarded one has been sent."""
        return self._num_done == len(self._chunks) and self._send_ring.is_drained

    def stall(self) -> Stall:
        """Describe the wait for partial sums of a rank of the node, for rows of another node, or for the network."""
        expected = f"chunk {self._num_done + 1} of {len(self._chunks)}"
        if self._num_done == len(self._chunks):
            return Stall("sending sums", self._remote_sources(), "all slices taken", "some still being sent")
        if self._next_local < len(self._memory.ranks):
            producer = self._memory.ranks[self._next_local]
            return Stall("adding partial sums", (producer,), f"partial sums for {expected}", "none")
        if self._chunks[self._num_done].src == self._plan.rank:
            waiting = self._returned.stall()
            return Stall("adding sums of other nodes", waiting.on_ranks, f"rows for {expected}", waiting.seen)
        return Stall("sending sums", self._remote_sources(), f"room to send {expected}", "all slots on the network")

    def _remote_sources(self) -> tuple[int, ...]:
        return tuple(src for src in self._plan.sources_held_by(self._plan.rank) if src != self._plan.rank)

    def _add_partials(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        moved = False
        if self._next_local == 0:
            sums.zero_()
        while self._next_local < len(self._memory.ranks):
            wanted = self._plan.row_to_locals[chunk.first : chunk.end, self._next_local].nonzero().squeeze(1)
            if len(wanted) and self._next_local == self._memory.local:
                first, end = self._partials.range_of(chunk.first, chunk.end)
                add_rows(self._partials.write(first, end, self._scratch[1]), wanted, sums)
            elif len(wanted):
                ring = self._rings[self._next_local]
                message = ring.message()
                if message is None:
                    return moved
                partial = as_rows(message, len(wanted), self._partials.hidden, self._partials.dtype)
                add_rows(partial, wanted, sums)
                self._profile.intranode_row_bytes += partial.nbytes
                ring.release()
            self._next_local += 1
            moved = True
        return moved

    def _send_back(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        slot = self._send_ring.slot()
        if slot is None:
            return False
        message = as_rows(slot, len(sums), self._partials.hidden, self._wire_dtype)
        message.copy_(sums)
        self._send_ring.commit(message.nbytes, chunk.src)
        self._profile.internode_row_bytes += message.nbytes
        return True

    def _finish_local(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        plan, memory = self._plan, self._memory
        first_row = plan.routing.src_to_first_row[plan.rank]
        tokens = torch.tensor([chunk.first - first_row, chunk.end - first_row], device="cpu")
        ranges = {}
        for node in plan.topology.remote_nodes(plan.rank):
            first, end = torch.searchsorted(plan.forwarding.node_to_tokens[node], tokens).tolist()
            src = plan.groups.forwarder(plan.rank, node)
            num_needed = -(-end // self._rows_per_chunk)
            if first < end and self._returned.num_arrived(src) < num_needed:
                return False
            ranges[node] = (first, end)
        for node, (first, end) in ranges.items():
            to_node = plan.forwarding.node_to_tokens[node]
            shape = (len(to_node), self._partials.hidden)
            returned = memory.pool(memory.local, node, shape, self._wire_dtype)
            add_rows(returned[first:end], to_node[first:end] - tokens[0], sums)
        self._out[tokens[0] : tokens[1]].copy_(sums)
        return True

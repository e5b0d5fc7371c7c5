"""Tasks of combine: sum rows on the ranks of their experts, then at the holder of the row, then at the token's rank.

All sums are in float32 (float64 for float64 rows). Their order depends on ranks and nodes only: for each token, over k
on each rank, then over the ranks of each node, then this node and the other nodes, ascending. One row for each token
and node is sent between nodes, in the form of the wire.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fusco.control.counters import Counters, no_counters
from fusco.control.record_round import Attachment
from fusco.core.errors import Stall
from fusco.core.profile import Call
from fusco.core.rows import accumulation_dtype
from fusco.core.wire import Wire
from fusco.cpu.channel import SendRing
from fusco.cpu.kernels.add_quantized_rows import add_quantized_rows
from fusco.cpu.kernels.add_rows import add_rows
from fusco.cpu.kernels.attached_sums import Holders, add_returned_sums, fold_attached_sums, produce_attached_sums
from fusco.cpu.kernels.quantize_rows import quantize_rows
from fusco.cpu.kernels.sum_rows import Chunks, Terms, fold_sums, has_message, produce_sums
from fusco.cpu.memory import CpuMemory
from fusco.cpu.plan import CpuPlan


class RowChunk(NamedTuple):
    """Rows ``first`` to ``end`` of the node's routing, summed and sent together to rank ``dst``, or this rank's."""

    dst: int
    first: int
    end: int


class ReturningRun(NamedTuple):
    """A run of this rank's rows whose sums return from another node."""

    tokens: torch.Tensor  # int64, ascending
    carrier: int  # the local rank in whose memory they arrive
    flag: int  # index of its flag that counts what arrived from the forwarder
    place: int  # of the first row among those that arrive there
    num_chunks_before: int  # chunks that arrive from the forwarder before
    ranks: tuple[int, ...]  # to wait for


class MissingSums(NamedTuple):
    """Sums of another node that are not there yet: the ranks to wait for, chunks needed, and what announces them."""

    ranks: tuple[int, ...]
    num_chunks: int
    counters: Counters


def as_rows(memory: torch.Tensor, num_rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """View the first bytes of ``memory`` as a matrix."""
    return memory[: num_rows * hidden * dtype.itemsize].view(dtype).view(num_rows, hidden)


class ProducePartialSums:
    """Task that computes the partial sums for other ranks of the node, into their rings."""

    def __init__(self, memory: CpuMemory, terms: Terms, chunks: Chunks) -> None:
        self._memory, self._terms, self._chunks = memory, terms, chunks
        self._num_left = len(chunks.bounds) if len(memory.ranks) > 1 else 0

    def step(self) -> bool:
        """Produce one chunk, or several small ones, for each consumer with free slots."""
        produced = produce_sums(self._terms, self._chunks, self._memory.rings_out)
        self._num_left = produced.num_left
        return produced.num_chunks > 0

    @property
    def is_done(self) -> bool:
        return not self._num_left

    def awaited(self) -> Counters:
        """Return the counts of messages that consumers took, of which one announces a free slot."""
        if not self._num_left:
            return no_counters()
        memory, rings = self._memory, self._memory.rings_out
        produced_flag = memory.layout.control.produced_flag
        waiting = [
            (rings.addresses[consumer, 1], memory.own.load(produced_flag(consumer)) - rings.depth + 1)
            for consumer, (first, end) in enumerate(self._chunks.local_to_chunks.tolist())
            if first < end and consumer != memory.local
        ]
        return np.array(waiting, np.int64)

    def stall(self) -> Stall:
        todo = (end - first for first, end in self._chunks.local_to_chunks.tolist())
        waiting = {rank: num for rank, num in zip(self._memory.ranks, todo, strict=True) if num}
        waiting.pop(self._memory.rank, None)
        return Stall("producing sums", tuple(waiting), "room in their rings", f"none, with {waiting} chunks to go")


class FoldSums:
    """Task that adds the partial sums of held rows: returns forwarded rows to their source, finishes local tokens."""

    def __init__(  # noqa: PLR0913  uses everything that combine moves
        self,
        *,
        plan: CpuPlan,
        memory: CpuMemory,
        terms: Terms,
        chunks: Chunks,
        send_ring: SendRing,
        scratch: torch.Tensor,
        out: torch.Tensor,
        wire: Wire,
        call: Call,
    ) -> None:
        self._plan, self._memory, self._terms, self._call = plan, memory, terms, call
        self._send_ring, self._out = send_ring, out
        self._wire, self._rows_per_chunk = wire, chunks.rows_per_chunk
        self._sums = as_rows(scratch, chunks.rows_per_chunk, terms.hidden, accumulation_dtype(out.dtype))
        first, end = chunks.local_to_chunks[memory.local]
        self._chunks = [RowChunk(*chunk) for chunk in chunks.bounds[first:end].tolist()]
        self._returning = self._returning_runs()
        self._missing: MissingSums | None = None
        self._num_done = 0
        self._next_local = 0  # local rank whose partial sums the current chunk adds next
        self._is_waiting = False  # for those

    def step(self) -> bool:
        """Sum one chunk, or several small ones."""
        has_moved, num_rows = False, 0
        while self._num_done < len(self._chunks) and num_rows < self._rows_per_chunk:
            chunk = self._chunks[self._num_done]
            sums = self._sums[: chunk.end - chunk.first]
            has_moved |= self._add_partials(chunk, sums)
            if self._next_local < len(self._memory.ranks):
                break
            is_local = chunk.dst == self._plan.rank
            if not (self._finish_local(chunk, sums) if is_local else self._send_back(chunk, sums)):
                break
            self._num_done, self._next_local, has_moved = self._num_done + 1, 0, True
            num_rows += len(sums)
        return has_moved

    @property
    def is_done(self) -> bool:
        return self._num_done == len(self._chunks) and self._send_ring.is_drained

    def awaited(self) -> Counters:
        """Return the counter that announces the next sums of this node, or those of another."""
        memory = self._memory
        if self._num_done == len(self._chunks):
            return no_counters()
        if (producer := self._next_local) < len(memory.ranks):
            num_taken = memory.own.load(memory.layout.control.consumed_flag(producer))
            return np.array([(memory.rings_in.addresses[producer, 0], num_taken + 1)])
        return self._missing.counters if self._missing else no_counters()

    def stall(self) -> Stall:
        expected = f"chunk {self._num_done + 1} of {len(self._chunks)}"
        if self._num_done == len(self._chunks):
            return Stall("sending sums", self._remote_sources(), "all slices taken", "some still being sent")
        if self._next_local < len(self._memory.ranks):
            producer = self._memory.ranks[self._next_local]
            return Stall("adding partial sums", (producer,), f"partial sums for {expected}", "none")
        if self._chunks[self._num_done].dst == self._plan.rank:
            ranks, num_chunks, _ = self._missing or ((), 0, None)
            return Stall("adding sums of other nodes", ranks, f"{num_chunks} chunks of them for {expected}", "fewer")
        return Stall("sending sums", self._remote_sources(), f"room to send {expected}", "all slots on the network")

    def _remote_sources(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._plan.rank_lanes.received.carrier.tolist()))

    def _add_partials(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        before = self._next_local
        if before == len(self._memory.ranks):
            return False
        # Asked first, as most steps only find that the next sums are not there: a tenth of the time of the call below.
        if self._is_waiting and not has_message(self._memory.rings_in, before):
            return False
        folded = fold_sums(self._terms, chunk.first, before, self._memory.rings_in, sums)
        self._next_local = folded.next_local
        self._is_waiting = folded.next_local < len(self._memory.ranks)
        self._call.profile.intranode_row_bytes += folded.num_peer_rows * self._terms.sum_bytes
        return folded.next_local > before

    def _send_back(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        slot = self._send_ring.slot()
        if slot is None:
            return False
        message = as_rows(slot, len(sums), self._wire.width, self._wire.dtype)
        write_sums(sums, self._wire, message)
        self._send_ring.commit(message.nbytes, chunk.dst)
        self._call.profile.internode_row_bytes += message.nbytes
        return True

    def _finish_local(self, chunk: RowChunk, sums: torch.Tensor) -> bool:
        plan, memory = self._plan, self._memory
        first_row = plan.routing.src_to_first_row[plan.rank]
        tokens = chunk.first - first_row, chunk.end - first_row
        found, self._missing = [], None
        for run in self._returning:
            first, end = run.tokens.numpy().searchsorted(tokens).tolist()
            if first < end:
                num_needed = run.num_chunks_before - (-end // self._rows_per_chunk)
                value = memory.layout.tag(self._call.sequence_number, num_needed)
                if memory.flags[run.carrier].load(run.flag) < value:
                    counters = np.array([(memory.addresses[run.carrier] + 8 * run.flag, value)])
                    self._missing = MissingSums(run.ranks, num_needed, counters)
                    return False
                found.append((run, first, end))
        for run, first, end in found:
            shape = (end - first, self._wire.width)
            returned = memory.crossing_rows(run.carrier, run.place + first, shape, self._wire.dtype)
            add_sums(returned, self._wire, run.tokens[first:end] - tokens[0], sums)
            if run.carrier != memory.local:
                self._call.profile.lane_row_bytes += returned.nbytes
        self._out[tokens[0] : tokens[1]].copy_(sums)
        return True

    def _returning_runs(self) -> list[ReturningRun]:
        plan, memory = self._plan, self._memory
        lanes = plan.rank_lanes
        if not len(lanes.own.src):
            return []
        tables = (*lanes.own, lanes.own_places, lanes.own_chunks(self._rows_per_chunk))
        return [
            ReturningRun(
                tokens=plan.forwarding.node_to_tokens[node][first:end],
                carrier=plan.topology.rank_to_local[carrier],
                flag=memory.layout.arrival_flag(forwarder),
                place=place,
                num_chunks_before=num_chunks,
                ranks=tuple(rank for rank in (forwarder, carrier) if rank != plan.rank),
            )
            for _, node, first, end, carrier, forwarder, place, num_chunks in zip(
                *(t.tolist() for t in tables), strict=True
            )
        ]


class AttachedSums:
    """Sums of one rank in a combine whose dispatch attached its rows, so that counterparts hold each other's rows.

    Ranks write their partial sums to shared memory before they publish their records within the node. When all are
    there, and equal, a rank adds the sums of its rows, and sends them to its counterparts with its record. So a rank
    waits twice, for its node and for its counterparts, and sends one message to each other node.
    """

    def __init__(
        self, plan: CpuPlan, memory: CpuMemory, terms: Terms, wire: Wire, dtype: torch.dtype, call: Call
    ) -> None:
        """Write this rank's partial sums to its shared memory; rows, and the result, have ``dtype``."""
        self._plan, self._memory, self._terms, self._call = plan, memory, terms, call
        self._wire, self._dtype = wire, dtype
        self._first_row = np.array(plan.routing.src_to_first_row)
        produce_attached_sums(terms, Holders(memory.sources, self._first_row, memory.sums_out))
        self._own_sums = torch.empty(0, dtype=torch.float32, device="cpu")  # of this rank's tokens

    def attach(self) -> Attachment:
        """Return the sums for other nodes; all ranks of this node have written theirs."""
        memory, hidden = self._memory, self._terms.hidden
        sources, first_row = memory.sources[memory.local], self._first_row
        num_rows = first_row[sources + 1] - first_row[sources]
        num_held, num_own = int(num_rows.sum()), int(num_rows[-1])
        sums = torch.empty(num_held, hidden, dtype=accumulation_dtype(self._dtype), device="cpu")
        num_peer_rows = fold_attached_sums(self._terms, Holders(memory.sources, first_row, memory.sums_in), sums)
        self._own_sums = sums[num_held - num_own :]
        returned = torch.empty(num_held - num_own, self._wire.width, dtype=self._wire.dtype, device="cpu")
        write_sums(sums[: num_held - num_own], self._wire, returned)
        bounds = np.zeros(len(sources) + 1, np.int64)
        bounds[memory.nodes[sources[:-1]] + 1] = num_rows[:-1]
        profile = self._call.profile
        profile.intranode_row_bytes += num_peer_rows * self._terms.sum_bytes
        profile.internode_row_bytes += returned.nbytes
        return Attachment(returned, bounds.cumsum() * self._wire.row_bytes)

    def finish(self, out: torch.Tensor) -> None:
        """Add the sums of other nodes, which are here, and write the result, (num_tokens, hidden)."""
        tokens, topology = self._plan.forwarding.node_to_tokens, self._memory.layout.topology
        returned = [
            (address, tokens[node].data_ptr(), len(tokens[node]))
            for node, address in zip(topology.remote_nodes(self._memory.rank), self._memory.attachments, strict=True)
        ]
        if self._wire.quantize is None:
            like = torch.empty(0, self._terms.hidden, dtype=self._wire.dtype, device="cpu")
            add_returned_sums(np.array(returned, np.int64), like, self._own_sums)
        else:
            for node, (address, _, _) in zip(topology.remote_nodes(self._memory.rank), returned, strict=True):
                add_quantized_rows(address, self._wire.quantize, tokens[node], self._own_sums)
        out.copy_(self._own_sums)


def write_sums(sums: torch.Tensor, wire: Wire, rows: torch.Tensor) -> None:
    """Write sums (num_rows, hidden) as accumulated to rows (num_rows, width) of the wire."""
    if wire.quantize is None:
        rows.copy_(sums)
        return
    hidden = sums.shape[1]
    quantize_rows(sums, wire.quantize, rows[:, :hidden], rows[:, hidden:])


def add_sums(rows: torch.Tensor, wire: Wire, row_to_sum: torch.Tensor, sums: torch.Tensor) -> None:
    """Add rows (num_rows, width) of the wire to ``sums[row_to_sum]``, in place."""
    if wire.quantize is None:
        add_rows(rows, row_to_sum, sums)
    else:
        add_quantized_rows(rows.data_ptr(), wire.quantize, row_to_sum, sums)

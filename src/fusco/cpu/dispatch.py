"""Tasks of dispatch: gather and send slices, receive slices, scatter rows to their slots."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from fusco.control.counters import Counters
from fusco.control.transport import Transport, memory_of
from fusco.core.errors import Stall
from fusco.core.lanes import IntArray
from fusco.core.profile import Call, CallProfile
from fusco.cpu.channel import SendRing
from fusco.cpu.kernels.gather_rows import gather_rows
from fusco.cpu.kernels.scatter_slices import SourceRows, scatter_slices
from fusco.cpu.memory import CpuMemory
from fusco.cpu.plan import CpuPlan
from fusco.planner.rank_lanes import chunks_before
from fusco.planner.sending import SendingStage, in_proportion, order_of_slices


class Outgoing(NamedTuple):
    """Slice to send: the rank that receives it, the local rank in whose pool its rows are, and which rows."""

    forwarder: int
    owner: int
    rows: IntArray


class SendRows:
    """Task that gathers rows for other nodes, slice by slice, while earlier slices are on the network.

    Rows that this rank carries for others of its node are read from their pools.
    """

    def __init__(self, plan: CpuPlan, memory: CpuMemory, ring: SendRing, row_bytes: int, call: Call) -> None:
        self._memory, self._ring, self._row_bytes, self._call = memory, ring, row_bytes, call
        rows_per_slice = plan.rows_per_slice(memory.layout.rows_per_slot(row_bytes))
        num_nodes = plan.topology.num_nodes
        # The next node first, so that nodes do not all send to the same one.
        per_node: dict[int, list[Outgoing]] = {(plan.node + step) % num_nodes: [] for step in range(1, num_nodes)}
        for src, node, first, end, _, forwarder in zip(*(c.tolist() for c in plan.rank_lanes.carried), strict=True):
            tokens, owner = plan.src_to_forwarding[src].node_to_tokens[node].numpy(), plan.topology.rank_to_local[src]
            per_node[node] += [
                Outgoing(forwarder, owner, tokens[i : min(i + rows_per_slice, end)])
                for i in range(first, end, rows_per_slice)
            ]
        self._todo = _staged(per_node, plan.sending_stages) if plan.sending_stages else _in_proportion(per_node)
        self._num_sent = 0

    def step(self) -> bool:
        """Gather and send one slice if a slot is free."""
        slot = self._ring.slot()
        if slot is None or self._num_sent == len(self._todo):
            return False
        forwarder, owner, rows = self._todo[self._num_sent]
        num_bytes, profile = len(rows) * self._row_bytes, self._call.profile
        gather_rows(int(self._memory.pools[owner]), rows, self._row_bytes, slot)
        self._ring.commit(num_bytes, forwarder)
        profile.internode_row_bytes += num_bytes
        if owner != self._memory.local:
            profile.lane_row_bytes += num_bytes
        self._num_sent += 1
        return True

    @property
    def is_done(self) -> bool:
        return self._num_sent == len(self._todo) and self._ring.is_drained

    def stall(self) -> Stall:
        forwarders = tuple(dict.fromkeys(forwarder for forwarder, _, _ in self._todo))
        return Stall("sending rows", forwarders, f"{len(self._todo)} slices taken", f"{self._num_sent} sent")


class ReceiveRows:
    """Task that receives slices directly into the pool and announces them to the node."""

    def __init__(
        self,
        memory: CpuMemory,
        transport: Transport,
        collective: int,
        runs: Sequence[tuple[int, int]],
        row_bytes: int,
        rows_per_slice: int,
    ) -> None:
        """``runs`` are, in order, the rank that each run of rows comes from and their number, of ``row_bytes`` each."""
        self._memory, self._collective = memory, collective
        self._src_to_num_slices = {src: 0 for src, _ in runs}
        self._src_to_num_arrived = dict(self._src_to_num_slices)
        shape = (sum(num for _, num in runs), row_bytes)
        rest = memory_of(memory.crossing_rows(memory.local, 0, shape, torch.uint8)) if runs else memoryview(b"")
        for src, num_rows in runs:
            for first in range(0, num_rows, rows_per_slice):
                num_bytes = min(rows_per_slice, num_rows - first) * row_bytes
                transport.receive(rest[:num_bytes], src, on_done=partial(self._announce, src))
                rest = rest[num_bytes:]
                self._src_to_num_slices[src] += 1
        self._num_left = sum(self._src_to_num_slices.values())
        self._num_left_before = self._num_left

    def _announce(self, src: int) -> None:
        """Count a slice, and increment the flag by which the node knows of those from its source."""
        self._num_left -= 1
        self._src_to_num_arrived[src] += 1
        layout = self._memory.layout
        tag = layout.tag(self._collective, self._src_to_num_arrived[src])
        self._memory.own.store(layout.arrival_flag(src), tag)

    def step(self) -> bool:
        """Return whether slices have arrived since the last step; the transport does the work."""
        before, self._num_left_before = self._num_left_before, self._num_left
        return self._num_left < before

    @property
    def is_done(self) -> bool:
        return not self._num_left

    def stall(self) -> Stall:
        num_slices, num_arrived = self._src_to_num_slices, self._src_to_num_arrived
        late = tuple(src for src, count in num_slices.items() if num_arrived[src] < count)
        return Stall("receiving rows", late, f"{sum(num_slices.values())} slices", f"{sum(num_arrived.values())}")


class ScatterRows:
    """Task that reads every row for this rank once, from its pool, and writes it to all its slots."""

    def __init__(
        self,
        plan: CpuPlan,
        memory: CpuMemory,
        collective: int,
        outputs: Sequence[torch.Tensor],
        attached: IntArray | None,
        profile: CallProfile,
    ) -> None:
        """``outputs`` are the expert-major rows of each payload as bytes, uint8 (num_slots, payload_bytes).

        ``attached`` has, by rank of another node, the address of its rows, if they are attached to the records.
        """
        row_bytes = sum(output.shape[1] for output in outputs)
        self._plan, self._memory, self._profile, self._row_bytes = plan, memory, profile, row_bytes
        sizes = [output.shape[1] for output in outputs]
        places = [
            (output.data_ptr(), size, end - size)
            for output, size, end in zip(outputs, sizes, accumulate(sizes), strict=True)
        ]
        self._outputs, self._payloads = np.array(places, np.int64), outputs  # which keeps their memory
        self._rows_per_slice = plan.rows_per_slice(memory.layout.rows_per_slot(row_bytes))
        self._rows = self._source_rows(collective, attached)
        self._num_done = np.zeros(len(self._rows), np.int64)
        self._num_left = len(self._rows)

    def step(self) -> bool:
        """Scatter about one slice of what is there."""
        tables = self._plan.distribution.pair_to_slot, self._plan.pairs.row_to_first_pair, self._outputs
        scattered = scatter_slices(self._rows, self._num_done, *tables, self._row_bytes, self._rows_per_slice)
        self._num_left = scattered.num_sources_left
        self._profile.intranode_row_bytes += scattered.num_peer_rows * self._row_bytes
        return scattered.num_rows > 0

    @property
    def is_done(self) -> bool:
        return not self._num_left

    def awaited(self) -> Counters:
        """Return the flags of which one announces more rows."""
        sources = SourceRows(*self._rows.T)
        left = np.flatnonzero(self._num_done < sources.num_rows)
        next_step = self._num_done[left] // sources.rows_per_step[left] + 1
        return np.stack((sources.flag[left], sources.before[left] + next_step), axis=1)

    def stall(self) -> Stall:
        num_left = self._rows[:, SourceRows._fields.index("num_rows")] - self._num_done
        runs, own = self._plan.rank_lanes.incoming, np.array(self._memory.ranks)
        waited_for = np.stack([np.append(own, column) for column in (runs.src, runs.carrier, runs.forwarder)], axis=1)
        ranks = dict.fromkeys(waited_for[num_left > 0].ravel().tolist())
        ranks.pop(self._memory.rank, None)
        seen, expected = int(self._num_done[num_left > 0].sum()), int(num_left.sum())
        return Stall("scattering rows", tuple(ranks), f"{seen + expected} rows in the pools of this node", f"{seen}")

    def _source_rows(self, collective: int, attached: IntArray | None) -> IntArray:
        """Return a ``SourceRows`` for each rank of the node and each run from others.

        Rows of this node are first, as they do not wait for the network.
        """
        plan, memory, rows_per_slice = self._plan, self._memory, self._rows_per_slice
        runs, first_row = plan.rank_lanes.incoming, np.array(plan.routing.src_to_first_row)
        ranks, holder = np.array(memory.ranks), memory.locals[runs.forwarder]
        num_rows, num_own = first_row[ranks + 1] - first_row[ranks], len(ranks)
        table = np.empty((num_own + len(holder), len(SourceRows._fields)), np.int64)
        own = SourceRows(*table[:num_own].T)
        own.flag[:] = memory.rows_flags
        own.before[:] = collective - 1
        own.rows_per_step[:] = own.num_rows[:] = num_rows
        own.pool[:] = memory.pools
        own.first_row[:] = first_row[ranks]
        own.is_of_peer[:] = ranks != memory.rank
        if not len(holder):
            return table
        of_runs = SourceRows(*table[num_own:].T)
        if attached is None:
            chunks = chunks_before(runs, runs.carrier * plan.topology.world_size + runs.forwarder, rows_per_slice)
            of_runs.flag[:] = memory.arrival_flags[holder, runs.carrier]
            of_runs.before[:] = memory.layout.tag(collective, 0) + chunks
            of_runs.rows_per_step[:] = rows_per_slice
            of_runs.pool[:] = memory.crossing_pools[holder] + runs.offsets_by(runs.forwarder) * self._row_bytes
        else:  # they came with the record, all of a rank as one run
            of_runs.flag[:] = memory.rows_flags[holder]
            of_runs.before[:] = collective - 1
            of_runs.rows_per_step[:] = runs.num_rows
            of_runs.pool[:] = attached[runs.src]
        of_runs.first_row[:] = first_row[runs.src] + runs.first
        of_runs.num_rows[:] = runs.num_rows
        of_runs.is_of_peer[:] = holder != memory.local
        return table


def _in_proportion(per_node: Mapping[int, list[Outgoing]]) -> list[Outgoing]:
    """Sort the slices so that all forwarders get their last ones together."""
    slices = list(itertools.chain(*per_node.values()))
    return [slices[i] for i in in_proportion(np.array([each.forwarder for each in slices], np.int64))]


def _staged(per_node: Mapping[int, list[Outgoing]], stages: Sequence[SendingStage]) -> list[Outgoing]:
    slices = {node: iter(of_node) for node, of_node in per_node.items()}
    return [next(slices[node]) for node in order_of_slices({n: len(s) for n, s in per_node.items()}, stages)]

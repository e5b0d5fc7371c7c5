"""Nodes of GPUs, simulated: a thread for each rank, the host's side of the CUDA engine as it is, twins for its kernels.

Addresses are those of CPU memory, and bytes really move between them: whatever slices, slots, pools and messages the
host computes is what happens. What runs when on a device is not simulated: each launch is done before the next.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fusco.engine.cuda.internode import InternodeShuffle
from fusco.engine.cuda.kernels import Payload, PublishedRouting
from fusco.engine.cuda.node import NodeShuffle
from fusco.engine.cuda.plan import DevicePlan, HeldRows
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement, Record, check_agreement
from fusco.kernels.cuda.arguments import Report
from fusco.kernels.reference.add_returned import add_returned
from fusco.kernels.reference.combine_rows import combine_rows, sum_partially
from fusco.kernels.reference.plan_forwarding import DeviceForwarding, plan_forwarding
from fusco.kernels.reference.plan_slots import mark_ranks, plan_slots
from fusco.memory.device_layout import DeviceLayout
from fusco.memory.layout import Capacity
from fusco.placement import ExpertPlacement
from fusco.settings import Settings
from fusco.topology import Topology
from fusco.transport.nccl import Message

_LIMIT_S = 30.0


class Stream:
    """A stream on which everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Event:
    """An event that has come."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what the engine takes from torch's CUDA work on the CPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


class Board:
    """What all ranks share: memories, meeting points, messages under way, what each rank has told the others."""

    def __init__(self, layout: DeviceLayout) -> None:
        topology = layout.topology
        size = layout.offsets["end"]
        # NaN in every dtype: nobody may rely on what memory holds.
        self.memories = [torch.full((size,), 0xFF, dtype=torch.uint8) for _ in range(topology.world_size)]
        self.world = threading.Barrier(topology.world_size)
        self.nodes = [threading.Barrier(topology.ranks_per_node) for _ in range(topology.num_nodes)]
        self.messages: dict[tuple[int, int], queue.Queue[tuple[str, bytes]]] = {
            (src, dst): queue.Queue() for src in range(topology.world_size) for dst in range(topology.world_size)
        }
        self.told: dict[int, Any] = {}

    def gather(self, rank: int, value: Any, barrier: threading.Barrier) -> dict[int, Any]:
        """Tell a value, and learn those of whoever meets at the barrier."""
        self.told[rank] = value
        barrier.wait(_LIMIT_S)
        told = dict(self.told)
        barrier.wait(_LIMIT_S)
        return told


class Arena:
    """See ``fusco.engine.cuda.arena.Arena``."""

    def __init__(self, layout: DeviceLayout, rank: int, board: Board) -> None:
        topology = layout.topology
        self.layout, self.rank, self.device, self._board = layout, rank, torch.device("cpu"), board
        self.node_ranks = topology.node_to_ranks[topology.rank_to_node[rank]]
        self.local = topology.rank_to_local[rank]
        self.report = Report(bad_src=-1)

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return -1, 0

    def address(self, local: int, buffer: int, offset: int) -> int:
        assert buffer == 0
        assert 0 <= offset <= self.layout.offsets["end"]
        return self._board.memories[self.node_ranks[local]].data_ptr() + offset

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        assert offset + num_bytes <= self.layout.offsets["sums"], "rows lie outside the pool"
        return self._board.memories[self.rank][offset : offset + num_bytes]


class Rounds:
    """See ``fusco.engine.host.rounds.Rounds``."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self._board, self.profile = rank, board, CallProfile()

    def publish(self, agreement: Agreement, counts: Sequence[int]) -> list[Record]:
        told = self._board.gather(self._rank, Record(agreement, tuple(counts)), self._board.world)
        records = [told[rank] for rank in sorted(told)]
        check_agreement([record.agreement for record in records], self._rank)
        return records


class Watch:
    """See ``fusco.liveness.watch.Watch``: here everything has come."""

    def wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], object]) -> None:
        assert is_ready(), stall()


class Network:
    """See ``fusco.engine.cuda.network.Network``."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self._board, self.stream = rank, board, Stream()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Event:
        for message in sends:
            sent = ctypes.string_at(message.address, message.num_bytes)
            self._board.messages[self._rank, message.peer].put((what, sent))
        for message in receives:
            theirs, came = self._board.messages[message.peer, self._rank].get(timeout=_LIMIT_S)
            assert theirs == what, f"rank {message.peer} sent {theirs}, {what} was expected: NCCL would wait for ever"
            assert len(came) == message.num_bytes, f"{what}: {len(came)} bytes came, {message.num_bytes} were expected"
            ctypes.memmove(message.address, came, len(came))
        return Event()


class Kernels:
    """See ``fusco.engine.cuda.kernels.Kernels``."""

    def __init__(self, arena: Arena, placement: ExpertPlacement, board: Board) -> None:
        topology = arena.layout.topology
        self._arena, self._board, self.num_sms = arena, board, 0
        self._node = topology.rank_to_node[arena.rank]
        self._meeting = board.nodes[self._node]
        self._expert_to_local = placement.local_index_table(arena.rank, arena.device)[:-1].int()
        places = zip(topology.rank_to_node, topology.rank_to_local, strict=True)
        rank_to_place = [local if node == self._node else -1 for node, local in places]
        self._expert_to_place = placement.membership_table(rank_to_place, arena.device)
        self._num_local = len(placement.rank_to_experts[arena.rank])

    def plan(
        self,
        plan: DevicePlan,
        published: Sequence[PublishedRouting],
        *,
        expert_alignment: int,
        max_slots: int,
        ticket: int,
        **_: Any,
    ) -> None:
        told = self._board.gather(self._arena.rank, list(published), self._meeting)
        by_source = {of.source: of for rank in self._arena.node_ranks for of in told[rank]}
        assert sorted(by_source) == list(range(len(plan.first_row) - 1)), "every source is published once in a node"
        ids = torch.cat([by_source[src].topk_idx.long() for src in sorted(by_source)])
        assert [len(by_source[src].topk_idx) for src in sorted(by_source)] == list(np.diff(plan.first_row))
        slots = plan_slots(ids, self._expert_to_local, self._num_local, expert_alignment, min(max_slots, 1 << 20))
        plan.row_to_slots.copy_(slots.row_to_slots)
        plan.num_rows_per_expert.copy_(slots.num_rows_per_expert)
        plan.block_to_first_slot.copy_(slots.block_to_first_slot)
        if plan.weights is not None:
            plan.weights.copy_(torch.cat([by_source[src].topk_weights for src in sorted(by_source)]))  # type: ignore[misc]
        held = torch.cat([by_source[src].topk_idx.long() for src in plan.held])
        plan.token_to_ranks.copy_(mark_ranks(self._expert_to_place[held], torch.arange(32)))
        self._arena.report.num_slots, self._arena.report.ticket = slots.num_slots_needed, ticket

    def stage(
        self, payloads: Sequence[Payload], pools: Sequence[int], num_tokens: int, num_sms: int | None, stream: int
    ) -> None:
        assert num_sms is not None
        assert stream == 0
        for payload, pool in zip(payloads, pools, strict=True):
            ctypes.memmove(pool, payload.address, num_tokens * payload.row_bytes)

    def scatter(
        self,
        plan: DevicePlan,
        held: HeldRows,
        payloads: Sequence[Payload],
        rows: Sequence[Sequence[int]],
        *,
        clears_padding: bool,
        **_: Any,
    ) -> None:
        self._meeting.wait(_LIMIT_S)  # all rows of the node are there
        for p, payload in enumerate(payloads):
            size = payload.row_bytes
            if clears_padding:
                ctypes.memset(payload.output_address, 0, plan.num_slots * size)
            for local, starts in enumerate(rows):
                for i, row in enumerate(range(held.first_row[local], held.first_row[local + 1])):
                    for slot in held.row_to_slots[row].tolist():
                        if slot >= 0:
                            ctypes.memmove(payload.output_address + slot * size, starts[p] + i * size, size)
        self._meeting.wait(_LIMIT_S)  # nobody reads the pools any more

    def combine(
        self,
        held: HeldRows,
        rows: torch.Tensor,
        wire_dtype: torch.dtype,
        out: torch.Tensor,
        *,
        is_weighted: bool,
        num_sms: int | None,
    ) -> None:
        assert num_sms is not None
        assert max(np.diff(held.first_row)) <= self._arena.layout.max_rows
        weights = held.weights if is_weighted else None
        # In float32 at the holder, whatever the rows are: ``out`` may be that wide.
        partial = sum_partially(rows, held.row_to_slots, weights, wire_dtype)
        told = self._board.gather(self._arena.rank, partial, self._meeting)
        local = self._arena.local
        own = slice(held.first_row[local], held.first_row[local + 1])
        received = {
            place: told[rank][own] for place, rank in enumerate(self._arena.node_ranks) if rank != self._arena.rank
        }
        wide = torch.promote_types(rows.dtype, torch.float32)
        own_weights = None if weights is None else weights[own]
        sums = combine_rows(rows.to(wide), held.row_to_slots[own], own_weights, received, held.token_to_ranks, local)
        assert sums.shape == out.shape, (sums.shape, out.shape)
        out.copy_(sums)

    def forwarding(
        self, topk_idx: torch.Tensor, expert_to_node: torch.Tensor, num_nodes: int, own_node: int, summary: torch.Tensor
    ) -> DeviceForwarding:
        table = torch.cat([expert_to_node.long(), torch.tensor([-1])])
        plan = plan_forwarding(topk_idx, table, num_nodes, own_node)
        summary.copy_(plan.summary)
        return plan

    def gather(self, rows: torch.Tensor, places: torch.Tensor, message: torch.Tensor, stream: int) -> None:
        assert stream == 0
        packed = rows.index_select(0, places).contiguous().view(-1).view(torch.uint8)
        message[: len(packed)] = packed

    def add_returned(
        self, own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        out.copy_(add_returned(own, returned, places, out.dtype))


def on_every_rank(
    topology: Topology,
    placement: ExpertPlacement,
    capacity: Capacity,
    settings: Settings,
    work: Callable[[int, InternodeShuffle, Rounds], Any],
) -> list[Any]:
    """Call a function on every rank of some simulated nodes and return its results, by rank."""
    layout = DeviceLayout(topology, capacity, settings)
    board = Board(layout)

    def run(rank: int) -> Any:
        arena, rounds = Arena(layout, rank, board), Rounds(rank, board)
        kernels: Any = Kernels(arena, placement, board)
        try:
            node = NodeShuffle(arena, kernels, placement, rounds, Watch())  # type: ignore[arg-type]
            return work(rank, InternodeShuffle(node, Network(rank, board)), rounds)  # type: ignore[arg-type]
        except BaseException:
            for barrier in (board.world, *board.nodes):
                barrier.abort()  # nobody waits for this rank
            raise

    with ThreadPoolExecutor(topology.world_size) as threads:
        futures = [threads.submit(run, rank) for rank in range(topology.world_size)]
        errors = [error for future in futures if (error := future.exception())]
        # A rank that breaks the meeting points fails first; what the others say of it is noise.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

"""Shared segments of the ranks of one node, all with the same layout, and waits for their flags."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusco.control.counters import Counters, warm_up_counters
from fusco.control.flags import Flags, load_acquire_at, warm_up_flags
from fusco.control.layout import NUM_COMPARED_INTS, RECORD_HEADER_INTS, ControlLayout
from fusco.control.shared_segment import SharedSegment
from fusco.control.watchdog import Watchdog
from fusco.core.compiled import compiled
from fusco.core.errors import Stall

_SPINS = 4_000  # polls before the interpreter goes on: about two microseconds, less than another call takes


@compiled()
def _have_reached(bases: Any, offset: int, value: int, spins: int) -> bool:
    """Return whether the int64 at ``offset`` from every base is at least ``value``, within ``spins`` further polls."""
    for i in range(len(bases)):
        while load_acquire_at(bases[i] + offset) < value:
            if spins <= 0:
                return False
            spins -= 1
    return True


@compiled()
def _gather_counts(records: Any, own: int, num_counts: int, counts: Any) -> bool:
    """Copy the counts of all records, by rank; return False as soon as a header differs from this rank's."""
    for i in range(len(records)):
        for word in range(NUM_COMPARED_INTS):
            if load_acquire_at(records[i] + 8 * word) != load_acquire_at(own + 8 * word):
                return False
        for j in range(num_counts):
            counts[i * num_counts + j] = load_acquire_at(records[i] + 8 * (RECORD_HEADER_INTS + j))
    return True


def warm_up_node_memory() -> None:
    """Compile what reads and writes flags and records, or read it from the disk cache."""
    warm_up_flags()
    warm_up_counters()
    record = np.zeros(RECORD_HEADER_INTS, dtype=np.int64)
    records = np.array([record.ctypes.data], dtype=np.int64)
    _have_reached(records, 0, 0, 0)
    _gather_counts(records, record.ctypes.data, 0, record)


class NodeMemory:
    """The segments of all ranks of a node, by local rank, with typed views of flags and records.

    Attributes:
        own_record: this rank's record, for its node.
        write_done: writes this rank's ``done_flag``; does nothing once closed.
        announce_record: writes this rank's ``record_flag``; does nothing once closed.
    """

    def __init__(self, layout: ControlLayout, rank: int, segments: list[SharedSegment]) -> None:
        self.layout = layout
        self.rank = rank
        topology = layout.topology
        self.node, self.local = topology.rank_to_node[rank], topology.rank_to_local[rank]
        self._segments = segments
        self.bytes = [segment.memory for segment in segments]
        # Made in advance: a rank that cannot use PyTorch where it is must still publish a record with its rejection.
        self._records: dict[tuple[int, int], memoryview] = {
            (local, node): self.record(local, node).numpy().data
            for local in range(len(segments))
            for node in range(topology.num_nodes)
        }
        self.own_record = self._records[self.local, self.node]
        own, size = self.bytes[self.local].numpy(), layout.attachment_bytes
        offsets = map(layout.attachment_offset, range(topology.num_nodes))
        self._attachments: list[memoryview] = [own[offset : offset + size].data for offset in offsets]
        self.flags = [Flags(memory[: layout.flags_bytes]) for memory in self.bytes]
        self.write_done, self.announce_record = map(self.own.writer, (layout.done_flag, layout.record_flag(self.node)))
        self._bases = np.array([memory.data_ptr() for memory in self.bytes], dtype=np.int64)
        places = zip(topology.rank_to_local, topology.rank_to_node, strict=True)
        self._record_addresses = np.array(
            [int(self._bases[local]) + layout.record_offset(node) for local, node in places], dtype=np.int64
        )
        self._own_record_address = int(self._record_addresses[rank])
        self._node_records = self._record_addresses[list(self.ranks)]
        self._counts = np.zeros(layout.record_ints * topology.world_size, dtype=np.int64)
        self._count_bytes = self._counts.data.cast("B")

    @property
    def own(self) -> Flags:
        """The flags that this rank may write."""
        return self.flags[self.local]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node, by local rank."""
        return self.layout.topology.node_to_ranks[self.node]

    def counterpart(self, node: int) -> int:
        """Return the rank with the same local rank on ``node``; the two exchange records and routing."""
        return self.layout.topology.node_to_ranks[node][self.local]

    def record(self, local: int, node: int) -> torch.Tensor:
        """Return the record from ``node`` in the segment of a local rank, uint8 (record_bytes,)."""
        offset = self.layout.record_offset(node)
        return self.bytes[local][offset : offset + self.layout.record_bytes]

    def record_bytes(self, local: int, node: int) -> memoryview:
        """Return the same record as a memoryview, which is faster to read and write than a tensor."""
        return self._records[local, node]

    def attachment(self, node: int) -> memoryview:
        """Memory of this rank for what its counterpart on ``node`` attaches to a record."""
        return self._attachments[node]

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Addresses of the segments, by local rank, and of the records of all ranks, by rank; valid until ``close``."""
        return self._bases.tolist(), self._record_addresses.tolist()

    def have_reached(self, flag: int, value: int) -> bool:
        """Return whether the flag of every rank of this node is at least ``value``, or becomes so in microseconds."""
        return bool(_have_reached(self._bases, 8 * flag, value, _SPINS))

    def counters(self, flag: int, value: int) -> Counters:
        """Return the flag of every rank of this node, as counters that should reach a value."""
        counters = np.empty((len(self._bases), 2), np.int64)
        counters[:, 0], counters[:, 1] = self._bases + 8 * flag, value
        return counters

    def counts_of_equal_records(self, num_counts: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the counts of all ranks, by rank; ``None`` if digest, handle or number of counts differ anywhere."""
        if not _gather_counts(self._record_addresses, self._own_record_address, num_counts, self._counts):
            return None
        world_size = len(self._record_addresses)
        if not num_counts:
            return ((),) * world_size
        return tuple(struct.iter_unpack(f"{num_counts}q", self._count_bytes[: 8 * num_counts * world_size]))

    @property
    def has_agreed(self) -> bool:
        """True if the records of all ranks of this node, which are here, have this rank's digest and handle."""
        records = self._node_records
        return len(records) > 0 and bool(_gather_counts(records, self._own_record_address, 0, self._counts))

    def close(self) -> None:
        """Close all segments."""
        self.bytes, self.flags = [], []
        self._records.clear()
        self._attachments.clear()
        self._bases = self._record_addresses = self._node_records = self._bases[:0]
        self.own_record = memoryview(b"")
        self.write_done = self.announce_record = _ignore
        while self._segments:
            self._segments.pop().close()


def _ignore(_value: int) -> None:
    pass


def wait_for_flag(
    memory: NodeMemory,
    watchdog: Watchdog,
    flag: int,
    value: int,
    phase: str,
    expected: str,
    node: int | None = None,
    poll: Callable[[], object] = lambda: None,
) -> None:
    """Wait until the flag of every rank of this node is at least ``value``; raises as ``Watchdog.wait_until``.

    Errors name the step, ``phase``, and what the flag announces, ``expected``. That comes from the ranks' counterparts
    on ``node``; ``None`` means from the ranks themselves. ``poll`` is called before every check; it moves what other
    ranks wait for.
    """

    def is_ready() -> bool:
        poll()
        return memory.have_reached(flag, value)

    def stall() -> Stall:
        topology = memory.layout.topology
        of_node = topology.node_to_ranks[memory.node if node is None else node]
        waiting = [local for local, flags in enumerate(memory.flags) if flags.load(flag) < value]
        sources = [of_node[local] for local in waiting]
        # This rank waits for the source, and for the rank of this node that passes the data on.
        ranks = dict.fromkeys(sources + [memory.ranks[local] for local in waiting])
        ranks.pop(memory.rank, None)
        return Stall(phase, tuple(ranks), f"{expected} from each of {len(memory.flags)} ranks", f"none from {sources}")

    watchdog.wait_until(is_ready, stall, memory.counters(flag, value))

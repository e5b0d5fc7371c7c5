"""Layout of a rank's peer-visible device memory: the only place that computes offsets, and so sizes."""

from __future__ import annotations

import itertools
from functools import cached_property

from fusco.core.config import EngineConfig
from fusco.core.memory_size import MemorySize
from fusco.cuda.kernels.abi import CHUNK_PAIRS
from fusco.cuda.kernels.spares import MAX_SPARE_BYTES
from fusco.cuda.tuning import EXCHANGE_CHANNELS, MAX_PARTS, NETWORK_SLICE_BYTES, STREAM_SLICE_BYTES
from fusco.planner.rank_lanes import most_crossing_rows

MAX_PAYLOADS = 8  # per dispatch
_PAIR_BYTES = 4 + 8  # of an expert id and the widest weight
_ALIGNMENT = 128  # a cache line; a multiple of the widest access of a lane, 16 bytes


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class DeviceLayout(EngineConfig):
    """Offsets in bytes from the start of an arena, the same on every rank. Names as in ``Comm`` of comm.cuh.

    The pool has room for the rows that this rank forwards for its node: from one rank of each other node, or its share
    of the links of its node if that is more.
    """

    @property
    def num_ranks(self) -> int:
        """Ranks of a node, which access each other's memory."""
        return self.topology.ranks_per_node

    @property
    def max_rows(self) -> int:
        """Maximum number of rows that a rank holds in one launch: its tokens, or a row of each rank of other nodes."""
        return max(self.capacity.max_tokens_per_rank, self.topology.world_size - self.num_ranks)

    @property
    def max_crossing_rows(self) -> int:
        """Rows that a rank may send to other nodes, or receive from them, by lanes."""
        return most_crossing_rows(self.capacity.max_tokens_per_rank * (self.topology.num_nodes - 1), self.rank_links)

    @property
    def max_routing_chunks(self) -> int:
        """Chunks of one rank's routing."""
        return max(1, -(-self.max_rows * self.capacity.num_topk // CHUNK_PAIRS))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each section in bytes; ``"end"`` is the total size."""
        tokens, ranks, sources = self.max_rows, self.num_ranks, self.topology.world_size
        pairs = tokens * self.capacity.num_topk
        sizes = {
            "routing_ready": 4 * sources * self.max_routing_chunks,
            "rows_released": 4 * ranks,
            "sums_released": 4 * ranks,
            "node_ready": 4 * ranks,
            "rows_ready": 4 * ranks * tokens * MAX_PARTS,
            "sums_ready": 4 * ranks * tokens * MAX_PARTS,
            "exchanged": 4 * 4 * EXCHANGE_CHANNELS * ranks,
            "ids": 2 * sources * pairs * 4,
            "weights": 2 * sources * pairs * 8,
            "pool": self._part_bytes(max(tokens * (self.topology.num_nodes - 1), self.max_crossing_rows)),
            "received": ranks * self.received_bytes,
            "rings": ranks * self.ring_depth * self.slot_bytes,
            "slices": self.ring_depth * self.network_slot_bytes if self.topology.num_nodes > 1 else 0,
        }
        return dict(zip((*sizes, "end"), itertools.accumulate(map(_align, sizes.values()), initial=0), strict=True))

    @property
    def ring_depth(self) -> int:
        """Slots of a ring; there is one ring to each peer."""
        return self.settings.ring_depth

    @property
    def slot_bytes(self) -> int:
        """Bytes of a ring slot: one slice of a byte stream within the node."""
        return _align(self.settings.slice_bytes or STREAM_SLICE_BYTES)

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice: what a rank sends to all other nodes together at a time."""
        return self.settings.slice_bytes or NETWORK_SLICE_BYTES

    @property
    def network_slot_bytes(self) -> int:
        """Bytes of a slot for slices between nodes: at least a row of each rank there, and padding for payloads."""
        num_remote = self.topology.num_nodes - 1
        least = self.capacity.max_row_bytes * num_remote * self.num_ranks
        return _align(max(self.slice_bytes, least)) + _ALIGNMENT * MAX_PAYLOADS * num_remote

    def rows_per_slice(self, row_bytes: int) -> int:
        """Return the rows of a slice to each other node; those of all nodes together fit into the section of sums."""
        num_remote = self.topology.num_nodes - 1
        by_bytes = self.slice_bytes // max(1, row_bytes * num_remote)
        return max(1, min(by_bytes, self.max_rows // num_remote))

    def max_held_rows(self, row_bytes: int) -> int:
        """Return the rows of a slice that a rank may receive, and sum, at once."""
        return min(self.max_rows, self.network_slot_bytes // max(1, row_bytes))

    def slice_offset(self, number: int) -> int:
        """Return the offset of the slot of a slice that this rank sends."""
        return self.offsets["slices"] + number % self.ring_depth * self.network_slot_bytes

    def ring_offset(self, consumer: int, message: int) -> int:
        """Return the offset of a message to a rank."""
        slot = consumer * self.ring_depth + message % self.ring_depth
        return self.offsets["rings"] + slot * self.slot_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank of the node pushes to another: its rows, or partial sums."""
        return self._part_bytes(self.max_rows)

    def received_offset(self, src: int, num_tokens: int, row_bytes: list[int], payload: int) -> int:
        """Return the offset of a payload's rows that rank ``src`` of the node, with ``num_tokens`` tokens, pushes."""
        before = sum(_align(num_tokens * size) for size in row_bytes[:payload])
        return self.offsets["received"] + src * self.received_bytes + before

    def pool_offset(self, num_rows: int, row_bytes: list[int], payload: int) -> int:
        """Return the offset of a payload's rows in the pool of a rank that forwards ``num_rows`` rows."""
        before = sum(_align(num_rows * size) for size in row_bytes[:payload])
        return self.offsets["pool"] + before

    def _part_bytes(self, num_rows: int) -> int:
        return _align(self.capacity.max_row_bytes * num_rows) + _ALIGNMENT * MAX_PAYLOADS

    @property
    def repeated_routing_bytes(self) -> int:
        """Bytes of the routing that repeated dispatches send and receive: ids and weights, likewise aligned."""
        num_bytes = self.capacity.max_tokens_per_rank * self.capacity.num_topk * _PAIR_BYTES
        return 2 * (self.topology.num_nodes - 1) * max(_ALIGNMENT, _align(num_bytes))

    @property
    def memory_size(self) -> MemorySize:
        """Device memory by purpose; private memory is that of repeated calls, at most."""
        at = self.offsets
        return MemorySize(
            control_bytes=at["ids"],
            routing_bytes=at["pool"] - at["ids"],
            pool_bytes=at["rings"] - at["pool"],
            ring_bytes=at["end"] - at["rings"],
            private_bytes=MAX_SPARE_BYTES + self.repeated_routing_bytes,
        )

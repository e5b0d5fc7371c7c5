"""Where everything stands in a rank's peer-visible device memory: the one place that computes offsets, and so sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusco.core.config import Capacity, Settings
from fusco.core.memory_size import MemorySize
from fusco.core.topology import Topology
from fusco.cuda.kernels.abi import CHUNK_PAIRS, CHUNK_ROWS, MAX_PARTS
from fusco.cuda.tuning import NETWORK_SLICE_BYTES, STREAM_SLICE_BYTES

MAX_PAYLOADS = 8  # of a dispatch
_ALIGNMENT = 128  # a cache line, and the largest access of a warp's lane many times over


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class DeviceLayout:
    """Offsets in bytes from the start of an arena, the same on every rank. Names as in ``Comm`` of comm.cuh.

    The pool has room for the own rows, and behind them for those that this rank forwards for its node: from one rank of
    each other node.
    """

    topology: Topology
    capacity: Capacity
    settings: Settings

    @property
    def num_ranks(self) -> int:
        """Ranks that see each other's memory: those of a node."""
        return self.topology.ranks_per_node

    @property
    def max_rows(self) -> int:
        """Most rows that a rank holds at once in one launch: its tokens, or a slice with a row of each other node."""
        return max(self.capacity.max_tokens_per_rank, self.topology.num_nodes - 1)

    @property
    def max_chunks(self) -> int:
        """Chunks of one rank's rows."""
        return -(-self.max_rows // CHUNK_ROWS)

    @property
    def max_routing_chunks(self) -> int:
        """Chunks of one rank's routing."""
        return max(1, -(-self.max_rows * self.capacity.num_topk // CHUNK_PAIRS))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each section begins; ``"end"`` is the size of it all."""
        tokens, ranks, sources = self.max_rows, self.num_ranks, self.topology.world_size
        pairs = tokens * self.capacity.num_topk
        sizes = {
            "routing_ready": 4 * sources * self.max_routing_chunks,
            "rows_released": 4 * ranks,
            "sums_released": 4 * ranks,
            "rows_ready": 4 * ranks * self.max_chunks,
            "sums_ready": 4 * ranks * tokens * MAX_PARTS,
            "ids": 2 * sources * pairs * 4,
            "weights": 2 * sources * pairs * 8,
            "pool": self._part_bytes(1) + self._part_bytes(self.topology.num_nodes - 1),
            "sums": ranks * tokens * self.capacity.max_row_bytes,
            "rings": ranks * self.ring_depth * self.slot_bytes,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += _align(size)
        return {**offsets, "end": end}

    @property
    def ring_depth(self) -> int:
        """Slots of the ring to each peer."""
        return self.settings.ring_depth

    @property
    def slot_bytes(self) -> int:
        """A slot of a ring: one slice of a byte stream within the node."""
        return _align(self.settings.slice_bytes or STREAM_SLICE_BYTES)

    @property
    def slice_bytes(self) -> int:
        """What a rank sends to all other nodes together before it sends more."""
        return self.settings.slice_bytes or NETWORK_SLICE_BYTES

    @property
    def network_slot_bytes(self) -> int:
        """A slot of the ring of slices between nodes: at least one row for each, and room to align every message."""
        num_remote = self.topology.num_nodes - 1
        least = self.capacity.max_row_bytes * num_remote
        return _align(max(self.slice_bytes, least)) + _ALIGNMENT * MAX_PAYLOADS * num_remote

    def rows_per_slice(self, row_bytes: int) -> int:
        """Rows that go to each other node in a slice; as many for all of them together as fit into the pool of sums."""
        num_remote = self.topology.num_nodes - 1
        by_bytes = self.slice_bytes // max(1, row_bytes * num_remote)
        return max(1, min(by_bytes, self.max_rows // num_remote))

    def ring_offset(self, consumer: int, message: int) -> int:
        """Where a message to a rank stands."""
        slot = consumer * self.ring_depth + message % self.ring_depth
        return self.offsets["rings"] + slot * self.slot_bytes

    def pool_offset(self, num_tokens: int, row_bytes: list[int], payload: int) -> int:
        """Where the rows of a payload stand in the pool of a rank with ``num_tokens`` tokens."""
        before = sum(_align(num_tokens * size) for size in row_bytes[:payload])
        return self.offsets["pool"] + before

    def forwarded_offset(self, num_rows: int, row_bytes: list[int], payload: int) -> int:
        """The same for the rows that a rank forwards, ``num_rows`` of them."""
        return self._part_bytes(1) + self.pool_offset(num_rows, row_bytes, payload)

    def _part_bytes(self, num_nodes: int) -> int:
        """Room in the pool for the rows of one rank of each of some nodes."""
        rows = self.max_rows * num_nodes
        return _align(self.capacity.max_row_bytes * rows) + _ALIGNMENT * MAX_PAYLOADS

    @property
    def memory_size(self) -> MemorySize:
        """What this comes to, of device memory."""
        at = self.offsets
        return MemorySize(
            control_bytes=at["ids"],
            routing_bytes=at["pool"] - at["ids"],
            pool_bytes=at["rings"] - at["pool"],
            ring_bytes=at["end"] - at["rings"],
            private_bytes=self._private_bytes,
        )

    @property
    def _private_bytes(self) -> int:
        """Slices on their way to other nodes."""
        return self.ring_depth * self.network_slot_bytes if self.topology.num_nodes > 1 else 0

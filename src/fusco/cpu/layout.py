"""Layout of a rank's shared segment on the CPU: computes all offsets and sizes."""

from __future__ import annotations

from functools import cached_property

from fusco.control.layout import ControlLayout, SegmentSizes, align
from fusco.core.config import EngineConfig
from fusco.core.memory_size import MemorySize
from fusco.planner.rank_lanes import most_crossing_rows

SLICE_BYTES = 1 << 20  # default of ``Settings.slice_bytes``
_MAX_ATTACHED_BYTES = 128 << 10  # from a rank to each other node: 0.1 ms on the loopback device, saves three messages


class CpuLayout(EngineConfig):
    """Offsets in bytes from the start of a rank's segment, the same on every rank; ``control`` comes first.

    A *region* contains the routing of one node: region 0 of this rank's tokens, region ``1 + i`` of the tokens of the
    i-th other node that its counterpart there sends. The pool has this rank's tokens, then rows that cross between
    nodes: in a dispatch those that it forwards, in a combine the sums of those that it carries.
    """

    @cached_property
    def control(self) -> ControlLayout:
        """Layout of flags and records."""
        num_flags = self.topology.num_nodes + self.topology.world_size
        return ControlLayout(self.topology, num_flags, self._attachment_bytes)

    @cached_property
    def _attachment_bytes(self) -> int:
        """Bytes for routing and rows of all tokens of a rank, if a dispatch can attach them to its record; else 0.

        They must be few, and the rows must be one slice. To how many nodes they go does not matter, since each
        attachment saves the messages to one.
        """
        capacity = self.capacity
        rows = capacity.max_tokens_per_rank * capacity.max_row_bytes
        num_bytes = align(rows + self._max_pairs * 12)  # ids, and weights at most
        is_small = rows <= self.slot_bytes and 0 < num_bytes <= _MAX_ATTACHED_BYTES
        return num_bytes if is_small and self.topology.num_nodes > 1 else 0

    @cached_property
    def can_attach_sums(self) -> bool:
        """True if a combine whose dispatch attached its rows can attach sums: if a ring has room for those of a rank.

        They are of all rows that the rank holds, at most twice as wide as rows.
        """
        capacity = self.capacity
        num_bytes = 2 * self.topology.num_nodes * capacity.max_tokens_per_rank * capacity.max_row_bytes
        return self._attachment_bytes > 0 and num_bytes <= self.settings.ring_depth * self.slot_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a ring slot: a slice, but at least one row summed in float32 (twice as wide as 16-bit rows)."""
        return align(max(self.settings.slice_bytes or SLICE_BYTES, 2 * self.capacity.max_row_bytes))

    def rows_per_slot(self, row_bytes: int) -> int:
        """Return the rows per slice: as many as fit into a slot. Sender and receiver cut by it."""
        return self.slot_bytes // row_bytes

    def routing_flag(self, node: int) -> int:
        """Flag: number of the last collective for which the routing of the counterpart on ``node`` has arrived."""
        return self.control.data_flag(node)

    def arrival_flag(self, rank: int) -> int:
        """Flag: number of slices that arrived from ``rank``, tagged with the collective (see ``tag``)."""
        return self.control.data_flag(self.topology.num_nodes + rank)

    @staticmethod
    def tag(collective: int, count: int) -> int:
        """Return a counter value that grows with the collective first, then with the count within it."""
        return collective << 32 | count

    # Sections.

    @cached_property
    def _max_pairs(self) -> int:
        return self.capacity.max_tokens_per_rank * self.capacity.num_topk

    def ids_offset(self, region: int) -> int:
        """Offset of expert ids, int32 (num_tokens, num_topk)."""
        return self.control.num_bytes + region * align(4 * self._max_pairs)

    def weights_offset(self, region: int) -> int:
        """Offset of weights, at most eight bytes each, (num_tokens, num_topk)."""
        return self.ids_offset(self.topology.num_nodes) + region * align(8 * self._max_pairs)

    @cached_property
    def pool_offset(self) -> int:
        """Offset of the pool, which begins with this rank's packed rows."""
        return self.weights_offset(self.topology.num_nodes)

    @cached_property
    def crossing_offset(self) -> int:
        """Offset of the pool's rows that cross between nodes."""
        return self.pool_offset + align(self.capacity.max_tokens_per_rank * self.capacity.max_row_bytes)

    @cached_property
    def _pool_end(self) -> int:
        return self.crossing_offset + align(self.max_crossing_rows * self.capacity.max_row_bytes)

    @cached_property
    def max_crossing_rows(self) -> int:
        """Rows that a rank may send to other nodes, or receive from them."""
        return most_crossing_rows(self.capacity.max_tokens_per_rank * (self.topology.num_nodes - 1), self.rank_links)

    def ring_offset(self, consumer: int, slot: int) -> int:
        """Offset of a slot of the ring that local rank ``consumer`` reads."""
        before = consumer * self.settings.ring_depth + slot
        return self._pool_end + before * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the whole segment."""
        return self.ring_offset(self.topology.ranks_per_node, 0)

    def region_of(self, local_node: int, node: int) -> int:
        """Return the region for the data of ``node`` on a rank of ``local_node``."""
        if node == local_node:
            return 0
        return 1 + node - (node > local_node)

    @property
    def num_private_slots(self) -> int:
        """Slots outside shared memory: a send ring, two receive slots for each rank of other nodes, two for sums."""
        num_remote = self.topology.world_size - self.topology.ranks_per_node
        return self.settings.ring_depth + 2 * num_remote + 2

    @property
    def memory_size(self) -> MemorySize:
        """Size of each section."""
        return MemorySize(
            control_bytes=self.ids_offset(0),
            routing_bytes=self.pool_offset - self.ids_offset(0),
            pool_bytes=self._pool_end - self.pool_offset,
            ring_bytes=self.num_bytes - self.ring_offset(0, 0),
            private_bytes=self.num_private_slots * self.slot_bytes,
        )

    @property
    def segment_sizes(self) -> SegmentSizes:
        """Sizes to allocate."""
        return SegmentSizes(self.control, self.num_bytes, self.memory_size.private_bytes)

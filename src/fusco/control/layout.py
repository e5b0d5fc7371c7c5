"""Where everything stands in a rank's shared segment: the one place that computes offsets, and so sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fusco.core.config import Settings
from fusco.core.integers import check_integer
from fusco.core.topology import Topology

_ALIGNMENT = 64  # a cache line: no two writers share one, and every dtype's view is aligned
RECORD_TEXT_BYTES = 1024
_RECORD_HEADER_INTS = 8
_SLICE_BYTES = 1 << 20  # unless settings say otherwise
_NUM_KINDS_OF_FLAGS_PER_NODE = 3


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a communicator must be able to take, for each rank.

    Attributes:
        max_tokens_per_rank: most tokens that any rank dispatches in one call.
        max_bytes_per_token: most bytes of one token's row in ``dispatch`` (all payloads together) and in ``combine``.
        num_topk: most expert slots of a token.

    Raises:
        TypeError, ValueError: for a capacity that is no positive integer.

    """

    max_tokens_per_rank: int
    max_bytes_per_token: int
    num_topk: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, least=1)

    @property
    def max_row_bytes(self) -> int:
        """Room for a row: a token, or the gradients of its weights, which travel as a row of num_topk values."""
        return max(self.max_bytes_per_token, 8 * self.num_topk)


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Bytes that one rank of a communicator takes, for good. Outputs are the caller's and not counted.

    ``pool_bytes``, ``routing_bytes``, ``ring_bytes`` and ``control_bytes`` are shared memory, ``private_bytes`` is not.
    """

    pool_bytes: int
    routing_bytes: int
    ring_bytes: int
    control_bytes: int
    private_bytes: int

    @property
    def shared_bytes(self) -> int:
        """All shared memory of a rank; a node needs it ``ranks_per_node`` times."""
        return self.pool_bytes + self.routing_bytes + self.ring_bytes + self.control_bytes

    @property
    def total_bytes(self) -> int:
        """Shared and private memory of a rank."""
        return self.shared_bytes + self.private_bytes


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets in bytes from the start of a rank's segment, the same on every rank.

    A *region* holds what comes from one node: region 0 the own rank's tokens, region ``1 + i`` those that the rank
    forwards (or whose routing it takes in) for the i-th other node.
    """

    topology: Topology
    capacity: Capacity
    settings: Settings

    def without_rows(self) -> ArenaLayout:
        """A layout for ranks that only exchange records and words: the least capacity, and slots as small."""
        least = Capacity(max_tokens_per_rank=1, max_bytes_per_token=1, num_topk=1)
        return replace(self, capacity=least, settings=replace(self.settings, slice_bytes=_ALIGNMENT))

    @cached_property
    def slot_bytes(self) -> int:
        """One ring slot: a slice, but at least one row summed in float32 (twice as wide as 16-bit rows)."""
        return _align(max(self.settings.slice_bytes or _SLICE_BYTES, 2 * self.capacity.max_row_bytes))

    def rows_per_slot(self, row_bytes: int) -> int:
        """How many rows make a slice: what fits into a slot. Sender and receiver cut by it."""
        return self.slot_bytes // row_bytes

    @property
    def record_ints(self) -> int:
        """Integers of a record: sizes and what a verb adds, then two for each rank of the group."""
        return _RECORD_HEADER_INTS + 2 * self.topology.world_size

    @property
    def record_bytes(self) -> int:
        """One record: its integers, then text."""
        return _align(self.record_ints * 8 + RECORD_TEXT_BYTES)

    # Flags, by index into the int64 array at offset 0.

    @property
    def done_flag(self) -> int:
        """Number of the last collective whose shared memory this rank no longer reads."""
        return 0

    @property
    def rows_flag(self) -> int:
        """Number of the last collective for which the own rows stand in the pool."""
        return 1

    def record_flag(self, node: int) -> int:
        """Number of the last collective for which the record of the counterpart on ``node`` is here."""
        return 2 + node

    def routing_flag(self, node: int) -> int:
        """Number of the last collective for which the routing of the counterpart on ``node`` is here."""
        return 2 + self.topology.num_nodes + node

    def arrival_flag(self, node: int) -> int:
        """Slices that arrived from ``node``, tagged with the collective (see ``tag``)."""
        return 2 + 2 * self.topology.num_nodes + node

    def produced_flag(self, consumer: int) -> int:
        """Messages that this rank ever put into its ring for local rank ``consumer``."""
        return 2 + _NUM_KINDS_OF_FLAGS_PER_NODE * self.topology.num_nodes + consumer

    def consumed_flag(self, producer: int) -> int:
        """Messages that this rank ever took from the ring of local rank ``producer``."""
        return self.produced_flag(self.topology.ranks_per_node) + producer

    @staticmethod
    def tag(collective: int, count: int) -> int:
        """A counter value that grows with the collective first, then with the count within it."""
        return collective << 32 | count

    # Sections.

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags, which stand first."""
        return _align(8 * self.consumed_flag(self.topology.ranks_per_node))

    def record_offset(self, node: int) -> int:
        """Where the record of the counterpart on ``node`` stands."""
        return self.flags_bytes + node * self.record_bytes

    @property
    def _ids_region_bytes(self) -> int:
        return _align(4 * self.capacity.max_tokens_per_rank * self.capacity.num_topk)

    @property
    def _weights_region_bytes(self) -> int:
        return _align(8 * self.capacity.max_tokens_per_rank * self.capacity.num_topk)

    def ids_offset(self, region: int) -> int:
        """Expert ids, int32 (num_tokens, num_topk)."""
        return self.record_offset(self.topology.num_nodes) + region * self._ids_region_bytes

    def weights_offset(self, region: int) -> int:
        """Weights, at most eight bytes each, (num_tokens, num_topk)."""
        return self.ids_offset(self.topology.num_nodes) + region * self._weights_region_bytes

    def pool_offset(self, region: int) -> int:
        """Rows of a region, packed."""
        region_bytes = _align(self.capacity.max_tokens_per_rank * self.capacity.max_row_bytes)
        return self.weights_offset(self.topology.num_nodes) + region * region_bytes

    def ring_offset(self, consumer: int, slot: int) -> int:
        """A slot of the ring that local rank ``consumer`` reads."""
        before = consumer * self.settings.ring_depth + slot
        return self.pool_offset(self.topology.num_nodes) + before * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """The whole segment."""
        return self.ring_offset(self.topology.ranks_per_node, 0)

    def region_of(self, own_node: int, node: int) -> int:
        """The region for what comes from ``node``, on a rank of ``own_node``."""
        if node == own_node:
            return 0
        return 1 + node - (node > own_node)

    @property
    def num_private_slots(self) -> int:
        """Slots outside shared memory: a send ring, two receive slots a peer beyond the node, two for sums."""
        num_remote = self.topology.world_size - self.topology.ranks_per_node
        return self.settings.ring_depth + 2 * num_remote + 2

    @property
    def memory_size(self) -> MemorySize:
        """What all this comes to."""
        last = self.topology.num_nodes
        return MemorySize(
            control_bytes=self.ids_offset(0),
            routing_bytes=self.pool_offset(0) - self.ids_offset(0),
            pool_bytes=self.pool_offset(last) - self.pool_offset(0),
            ring_bytes=self.num_bytes - self.ring_offset(0, 0),
            private_bytes=self.num_private_slots * self.slot_bytes,
        )

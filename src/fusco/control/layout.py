"""Layout of flags and records at the beginning of a rank's shared segment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusco.core.topology import Topology

ALIGNMENT = 64  # a cache line: no two writers share one, and views of every dtype are aligned
RECORD_TEXT_BYTES = 1024
# Digest (2), handle, number of counts, bytes of text, bytes of the attachment, and 1 if the ranks of the sender's node
# agree; see ``RecordExchange``.
RECORD_HEADER_INTS = 7
NUM_ATTACHED_INT, NODE_AGREES_INT = 5, 6
NUM_COMPARED_INTS = 4  # of a header, those that must be equal on all ranks
_MAX_VERB_COUNTS = 8  # counts of a verb besides those for each rank
_LEAST_MAX_COUNTS = 40  # of few ranks: 159 experts' in one record (``api/owners.py``), which fits into one packet


def align(num_bytes: int) -> int:
    """Round up to a multiple of a cache line."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ControlLayout:
    """Offsets in bytes from the start of a rank's segment, the same on every rank: flags first, then records.

    ``num_data_flags`` flags are for a backend that moves data through the same memory. Each record has room for an
    attachment of ``attachment_bytes`` behind it, a multiple of a cache line.
    """

    topology: Topology
    num_data_flags: int = 0
    attachment_bytes: int = 0

    @property
    def max_counts(self) -> int:
        """Most counts in a record: those of a verb, then two for each rank of the group."""
        return max(_MAX_VERB_COUNTS + 2 * self.topology.world_size, _LEAST_MAX_COUNTS)

    @cached_property
    def record_ints(self) -> int:
        """Number of integers in a record: its header, and the most counts."""
        return RECORD_HEADER_INTS + self.max_counts

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record: its integers, then text."""
        return align(self.record_ints * 8 + RECORD_TEXT_BYTES)

    # Flags, by index into the int64 array at offset 0.

    @property
    def done_flag(self) -> int:
        """Index of the flag for the last collective whose shared memory this rank no longer reads."""
        return 0

    def record_flag(self, node: int) -> int:
        """Index of the flag for the last collective whose record from the counterpart on ``node`` is here."""
        return 1 + node

    def produced_flag(self, consumer: int) -> int:
        """Index of the count of messages that this rank put into its ring of byte streams for ``consumer`` (local)."""
        return 1 + self.topology.num_nodes + consumer

    def consumed_flag(self, producer: int) -> int:
        """Index of the count of messages that this rank took from the ring of local rank ``producer``."""
        return self.produced_flag(self.topology.ranks_per_node) + producer

    def data_flag(self, number: int) -> int:
        """Index of the backend's flag ``number``."""
        return self.consumed_flag(self.topology.ranks_per_node) + number

    # Sections.

    @cached_property
    def flags_bytes(self) -> int:
        """Bytes of the flags, which come first."""
        return align(8 * self.data_flag(self.num_data_flags))

    def record_offset(self, node: int) -> int:
        """Offset in bytes of the record of the counterpart on ``node``."""
        return self.flags_bytes + node * (self.record_bytes + self.attachment_bytes)

    def attachment_offset(self, node: int) -> int:
        """Offset in bytes of what the counterpart on ``node`` attached to its record."""
        return self.record_offset(node) + self.record_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of flags and records; data may follow."""
        return self.record_offset(self.topology.num_nodes)


@dataclass(frozen=True)
class SegmentSizes:
    """Sizes in bytes of a rank's shared segment and of the private memory that it allocates with it.

    ``num_bytes`` is the size of the whole segment, which begins with ``control``.
    """

    control: ControlLayout
    num_bytes: int
    private_bytes: int = 0

    @classmethod
    def of_control(cls, topology: Topology) -> SegmentSizes:
        """Return the sizes for a backend whose data is elsewhere."""
        control = ControlLayout(topology)
        return cls(control, control.num_bytes)

"""Where flags and records are in a rank's shared segment, whatever else is behind them."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.core.topology import Topology

ALIGNMENT = 64  # a cache line: no two writers share one, and every dtype's view is aligned
RECORD_TEXT_BYTES = 1024
_RECORD_HEADER_INTS = 8


def align(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ControlLayout:
    """Offsets in bytes from the start of a rank's segment, the same on every rank: flags first, then records.

    ``num_data_flags`` are for what a backend moves by the same memory.
    """

    topology: Topology
    num_data_flags: int = 0

    @property
    def record_ints(self) -> int:
        """Integers of a record: sizes and what a verb adds, then two for each rank of the group."""
        return _RECORD_HEADER_INTS + 2 * self.topology.world_size

    @property
    def record_bytes(self) -> int:
        """One record: its integers, then text."""
        return align(self.record_ints * 8 + RECORD_TEXT_BYTES)

    # Flags, by index into the int64 array at offset 0.

    @property
    def done_flag(self) -> int:
        """Number of the last collective whose shared memory this rank no longer reads."""
        return 0

    def record_flag(self, node: int) -> int:
        """Number of the last collective for which the record of the counterpart on ``node`` is here."""
        return 1 + node

    def produced_flag(self, consumer: int) -> int:
        """Messages that this rank ever put into its ring of byte streams for local rank ``consumer``."""
        return 1 + self.topology.num_nodes + consumer

    def consumed_flag(self, producer: int) -> int:
        """Messages that this rank ever took from the ring of local rank ``producer``."""
        return self.produced_flag(self.topology.ranks_per_node) + producer

    def data_flag(self, number: int) -> int:
        """One of the backend's."""
        return self.consumed_flag(self.topology.ranks_per_node) + number

    # Sections.

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags, which are first."""
        return align(8 * self.data_flag(self.num_data_flags))

    def record_offset(self, node: int) -> int:
        """Where the record of the counterpart on ``node`` is."""
        return self.flags_bytes + node * self.record_bytes

    @property
    def num_bytes(self) -> int:
        """All of it; data may follow."""
        return self.record_offset(self.topology.num_nodes)


@dataclass(frozen=True)
class SegmentSizes:
    """A rank's shared segment, and the private memory that it needs room for at the same time.

    ``num_bytes`` is the whole segment, which begins with ``control``.
    """

    control: ControlLayout
    num_bytes: int
    private_bytes: int = 0

    @classmethod
    def of_control(cls, topology: Topology) -> SegmentSizes:
        """Of a backend whose data is elsewhere."""
        control = ControlLayout(topology)
        return cls(control, control.num_bytes)

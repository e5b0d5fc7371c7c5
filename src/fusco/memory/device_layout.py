"""Where everything stands in a rank's peer-visible device memory: the one place that computes offsets, and so sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusco.memory.layout import Capacity, MemorySize
from fusco.settings import Settings

CHUNK_ROWS = 16  # rows that are staged and announced together; any number of them begins on a multiple of 16 bytes
MAX_PARTS = 4  # warps that may share a row, if there are few rows
MAX_PAYLOADS = 8
_ALIGNMENT = 128  # a cache line, and the largest access of a warp's lane many times over


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class DeviceLayout:
    """Offsets in bytes from the start of an arena, the same on every rank. Names as in ``Comm`` of comm.cuh."""

    num_ranks: int
    capacity: Capacity
    settings: Settings

    @property
    def max_chunks(self) -> int:
        """Chunks of one rank's rows."""
        return -(-self.capacity.max_tokens_per_rank // CHUNK_ROWS)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each section begins; ``"end"`` is the size of it all."""
        tokens, ranks = self.capacity.max_tokens_per_rank, self.num_ranks
        pairs = tokens * self.capacity.num_topk
        sizes = {
            "routing_ready": 4 * ranks,
            "rows_released": 4 * ranks,
            "sums_released": 4 * ranks,
            "rows_ready": 4 * ranks * self.max_chunks,
            "sums_ready": 4 * ranks * tokens * MAX_PARTS,
            "ids": 2 * ranks * pairs * 4,
            "weights": 2 * ranks * pairs * 8,
            "pool": self.capacity.max_row_bytes * tokens + _ALIGNMENT * MAX_PAYLOADS,
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
        """A slot of a ring: one slice of a byte stream."""
        return _align(self.settings.slice_bytes)

    def ring_offset(self, consumer: int, message: int) -> int:
        """Where a message to a rank stands."""
        slot = consumer * self.ring_depth + message % self.ring_depth
        return self.offsets["rings"] + slot * self.slot_bytes

    def pool_offset(self, num_tokens: int, row_bytes: list[int], payload: int) -> int:
        """Where the rows of a payload stand in the pool of a rank with ``num_tokens`` tokens."""
        before = sum(_align(num_tokens * size) for size in row_bytes[:payload])
        return self.offsets["pool"] + before

    @property
    def memory_size(self) -> MemorySize:
        """What this comes to, of device memory."""
        at = self.offsets
        return MemorySize(
            control_bytes=at["ids"],
            routing_bytes=at["pool"] - at["ids"],
            pool_bytes=at["rings"] - at["pool"],
            ring_bytes=at["end"] - at["rings"],
            private_bytes=0,
        )

"""Memory of one rank's communicator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Bytes that a communicator holds on one rank until it is closed. Outputs belong to the caller and do not count.

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

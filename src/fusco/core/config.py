"""What a user may set about how a communicator works, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fusco.core.integers import check_integer

_LONGEST_TIMEOUT_S = 1_000_000  # eleven days; sockets, timers and devices count limits in types of their own


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all ranks of a communicator share.

    Attributes:
        slice_bytes: size of one message between nodes, and of one ring slot within a node. Large enough that the
            cost of a message (tens of microseconds over TCP) is small against its transfer, small enough that
            packing, transfer and unpacking of different slices overlap. ``None`` means 1 MiB, but 16 MiB between nodes
            on CUDA, for all nodes together (docs/design.md says why).
        ring_depth: slots of each ring; 2 is the least that lets a producer work while its consumer does.
        timeout_s: the limit of every wait, in seconds, at most 1,000,000. When it runs out, all ranks raise
            ``PeerFailureError``.
        wire_dtype: dtype in which ``combine`` sends partial sums between nodes, unless rows are wider; ``None`` means
            the dtype of the rows. ``torch.float32`` sends sums of 16-bit rows as accumulated, at twice the bytes.
        slice_order: which node a rank sends its next slice to. ``"in-turn"``: all others in turn. ``"staged"``: by the
            stages of a schedule, in which every node receives from one node only (FAST); for skewed routing between
            nodes whose network suffers when several send to one.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.

    """

    slice_bytes: int | None = None
    ring_depth: int = 4
    timeout_s: float = 60.0
    wire_dtype: torch.dtype | None = None
    slice_order: Literal["in-turn", "staged"] = "in-turn"

    def __post_init__(self) -> None:
        if self.slice_bytes is not None:
            check_integer("slice_bytes", self.slice_bytes, least=1)
        check_integer("ring_depth", self.ring_depth, least=2)
        if not isinstance(self.timeout_s, (int, float)) or isinstance(self.timeout_s, bool):
            raise TypeError(f"timeout_s must be a number, got {self.timeout_s!r}")
        if not 0 < self.timeout_s <= _LONGEST_TIMEOUT_S:
            raise ValueError(f"timeout_s must be positive and at most {_LONGEST_TIMEOUT_S:,}, got {self.timeout_s}")
        if self.slice_order not in ("in-turn", "staged"):
            raise ValueError(f"slice_order must be 'in-turn' or 'staged', got {self.slice_order!r}")
        if self.wire_dtype not in (None, torch.float32):
            raise ValueError(f"wire_dtype must be None or torch.float32, got {self.wire_dtype}")

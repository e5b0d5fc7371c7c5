"""Memory that relays may take on other GPUs, and when it is given back (FuseLink, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusco.core.integers import check_integer

MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RelayBudget:
    """Bounds of what a process takes on each relay GPU.

    Attributes:
        max_bytes: bytes on a relay GPU at most: the relay buffers, and the process's CUDA context there if it has no
            other use for it, which is most of it.
        low_bytes: free memory of a relay GPU below which everything there is given back.
        high_bytes: free memory above which it may be taken. The distance is what keeps a relay from coming and going.
        max_relays: relay GPUs of a process at most. Host memory limits what more of them would bring.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    max_bytes: int = 1024 * MB
    low_bytes: int = 2048 * MB
    high_bytes: int = 4096 * MB
    max_relays: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, least=0)
        if self.high_bytes < self.low_bytes + self.max_bytes:
            raise ValueError(
                f"high_bytes must be at least low_bytes + max_bytes, or taking a relay's memory would make it low: got "
                f"{self.high_bytes}, {self.low_bytes} + {self.max_bytes}"
            )

    def why_not(self, free_bytes: int, wanted_bytes: int) -> str:
        """Return why a relay GPU may not be used; empty if it may.

        >>> RelayBudget().why_not(8192 * MB, 16 * MB)
        ''
        >>> RelayBudget().why_not(3000 * MB, 16 * MB)
        'only 3,000 MiB of its memory are free, of 4,096 that must be'
        """
        if wanted_bytes > self.max_bytes:
            return f"relays may take {self.max_bytes / MB:,.0f} MiB there, and would take {wanted_bytes / MB:,.0f}"
        if free_bytes < self.high_bytes:
            return (
                f"only {free_bytes / MB:,.0f} MiB of its memory are free, of {self.high_bytes / MB:,.0f} that must be"
            )
        return ""

    def decide(self, free_bytes: int, held_bytes: int) -> Literal["keep", "give back"]:
        """Return what to do with the memory that is held on a relay GPU.

        >>> RelayBudget().decide(3000 * MB, 600 * MB), RelayBudget().decide(1999 * MB, 600 * MB)
        ('keep', 'give back')
        """
        return "give back" if free_bytes < self.low_bytes or held_bytes > self.max_bytes else "keep"

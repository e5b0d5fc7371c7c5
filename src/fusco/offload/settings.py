"""Settings of a copier, and the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fusco.core.integers import check_integer
from fusco.offload.budget import RelayBudget
from fusco.offload.driver import cuda_driver
from fusco.offload.links import Links, links_board, nvml_links
from fusco.offload.mover import MAX_SLOTS
from fusco.rails.limits import Limits

#: Bounds of chunks on PCIe links.
LINK_LIMITS = Limits(chunk_bytes=2 << 20, direct_first=2, direct_depth=4, borrowed_per_rail=4)


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Settings of a copier.

    Attributes:
        limits: bounds of the scheduler, as of ``fusco.rails``; those of batches and connections have no meaning here.
        budget: memory that may be taken on other GPUs.
        relays: the GPUs whose links may be taken, as CUDA numbers them; ``None``: all that NVLink connects, those after
            this one first, as many as the budget allows.
        uses_own_link: whether copies take the GPU's own link; without it they take relays only, for measurements.
        copies_with: ``"copy-engines"`` moves chunks between GPUs by copy engines (D2 of FuseLink, Figure 6),
            ``"threads"`` by a kernel (D1), which then moves what takes the own link, too (D3 instead of D4).
        min_bytes: copies of less take the own link as one ``cudaMemcpyAsync``.
        timeout_s: the limit of every wait.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    limits: Limits = LINK_LIMITS
    budget: RelayBudget = field(default_factory=RelayBudget)
    relays: tuple[int, ...] | None = None
    uses_own_link: bool = True
    copies_with: Literal["copy-engines", "threads"] = "copy-engines"
    min_bytes: int = 16 << 20
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_integer("min_bytes", self.min_bytes, least=0)
        if self.copies_with not in ("copy-engines", "threads"):
            raise ValueError(f"copies_with must be 'copy-engines' or 'threads', got {self.copies_with!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if max(self.limits.direct_depth, self.limits.borrowed_per_rail) > MAX_SLOTS:
            raise ValueError(
                f"direct_depth and borrowed_per_rail must be at most {MAX_SLOTS}, got {self.limits.direct_depth}, "
                f"{self.limits.borrowed_per_rail}"
            )


@dataclass(frozen=True)
class Machine:
    """What a copier runs on; tests have their own.

    Attributes:
        driver: a ``CudaDriver`` or what behaves like one.
        links: returns the GPUs of this host.
        board: returns the file of the board.
        current_stream: returns the handle of the caller's current stream on a device.
        has_threads: whether movers run by themselves; otherwise the owner steps them.
    """

    driver: Any
    links: Callable[[], Links]
    board: Callable[[], Path]
    current_stream: Callable[[int], int]
    has_threads: bool = True


def this_machine() -> Machine:
    """Return this machine; raises ``OSError`` where there is no CUDA driver."""
    return Machine(cuda_driver(), nvml_links, links_board, _current_stream)


def _current_stream(device: int) -> int:
    import torch  # noqa: PLC0415  fusco.offload alone does not load it

    return int(torch.cuda.current_stream(device).cuda_stream)

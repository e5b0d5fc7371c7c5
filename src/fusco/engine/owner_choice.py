"""Interface of a backend's choice of owners, where an expert is in several places; see ``fusco.planner.owners``."""

from __future__ import annotations

from typing import Protocol

import torch

from fusco.core.lanes import IntArray
from fusco.planner.owners import Int32Array, OwnerTables


class OwnerChoice(Protocol):
    """Chooses the owner of each row of this rank. Tensors are on the engine's device."""

    def place(self, tables: OwnerTables) -> None:
        """Take these tables for all further calls; on a device, also for replays of graphs, in order of the stream."""

    def count(self, topk_idx: torch.Tensor) -> IntArray:
        """Return the pairs (token, k) of each expert with several owners, int64 (D,); the host waits for them."""

    def count_experts(self, topk_idx: torch.Tensor) -> IntArray:
        """Return the pairs of every expert, int64 (E,), without invalid ids; the host waits for them."""

    def choose(self, topk_idx: torch.Tensor, bounds: Int32Array | None) -> torch.Tensor:
        """Return the physical expert of each pair, of the dtype and shape of ``topk_idx``, contiguous.

        ``bounds`` are those of ``OwnerTables.divide_rows``, if there are shares. Invalid ids stay invalid.
        """

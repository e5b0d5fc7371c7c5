"""Rows in the pools of a node's ranks that one launch moves or sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.cuda.kernels.abi import MAX_PARTS
from fusco.cuda.tuning import parts_of_row


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """Rows in the pools of a node's ranks, and their slots on this rank.

    Attributes:
        first_row: ``ranks_per_node + 1`` entries; rank ``r`` of the node holds rows ``first_row[r]`` to
            ``first_row[r + 1]``.
        row_to_slots: int32 (num_rows, num_topk): the slot of each pair; -1 if its expert is elsewhere, -2 if dropped.
        weights: float32 or float64 (num_rows, num_topk), or ``None``.
        token_to_ranks: int32, for each row that this rank holds; bit ``r`` is set if rank ``r`` of the node owns an
            expert of it.

    """

    first_row: tuple[int, ...]
    row_to_slots: torch.Tensor
    weights: torch.Tensor | None
    token_to_ranks: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it holds on the device."""
        return [self.row_to_slots, self.token_to_ranks, *([] if self.weights is None else [self.weights])]

    @property
    def longest(self) -> int:
        """Maximum number of rows that a rank holds."""
        return max(end - first for first, end in zip(self.first_row, self.first_row[1:], strict=False))

    @property
    def num_parts(self) -> int:
        """Number of warps that share a row."""
        num_ranks = len(self.first_row) - 1
        return parts_of_row(self.longest * num_ranks, MAX_PARTS)

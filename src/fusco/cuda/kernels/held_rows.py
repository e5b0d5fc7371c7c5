"""Rows in the pools of a node's ranks that one launch moves or sums."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch


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
    def num_rows_of_ranks(self) -> list[int]:
        """Number of rows that each rank of the node holds."""
        return [end - first for first, end in pairwise(self.first_row)]

    @property
    def longest(self) -> int:
        """Maximum number of rows that a rank holds."""
        return max(self.num_rows_of_ranks)

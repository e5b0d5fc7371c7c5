"""Rows in the pools of a node's ranks that one launch moves or sums."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from fusco.cuda.kernels.abi import address


class RowAddresses(NamedTuple):
    """Addresses of the tensors of ``HeldRows``; ``weights`` is 0 without any."""

    row_to_slots: int
    weights: int
    token_to_ranks: int


FROM_FIRST_ROW = RowAddresses(0, 0, 0)  # offsets of rows that are all of a plan's


class Rows(Protocol):
    """Rows that a kernel moves or sums: ``HeldRows``, or the plan itself if there is one node."""

    @property
    def first_row(self) -> tuple[int, ...]:
        """See ``HeldRows``."""

    @property
    def addresses(self) -> RowAddresses:
        """Addresses of the tensors."""

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight; 0 without weights."""


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """Rows in the pools of a node's ranks, and their slots on this rank."""

    # ``ranks_per_node + 1`` entries; rank ``r`` of the node holds rows ``first_row[r]`` to ``first_row[r + 1]``
    first_row: tuple[int, ...]
    # int32 (num_rows, num_topk): the slot of each pair; -1 if its expert is elsewhere, -2 if dropped
    row_to_slots: torch.Tensor
    weights: torch.Tensor | None  # float32 or float64 (num_rows, num_topk), or ``None``
    # int32, for each row that this rank holds; bit ``r`` is set if rank ``r`` of the node owns an expert of it
    token_to_ranks: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it holds on the device."""
        return [self.row_to_slots, self.token_to_ranks, *([] if self.weights is None else [self.weights])]

    @cached_property
    def addresses(self) -> RowAddresses:
        return RowAddresses(self.row_to_slots.data_ptr(), address(self.weights), self.token_to_ranks.data_ptr())

    @property
    def num_topk(self) -> int:
        return self.row_to_slots.shape[1]

    @property
    def weight_bytes(self) -> int:
        return 0 if self.weights is None else self.weights.element_size()


def longest_of(first_row: tuple[int, ...]) -> int:
    """Return the maximum number of rows that a rank holds.

    >>> longest_of((0, 3, 3, 8))
    5
    """
    return max(end - first for first, end in itertools.pairwise(first_row))

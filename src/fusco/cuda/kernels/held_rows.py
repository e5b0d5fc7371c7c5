"""Rows in the pools of a node's ranks that one launch moves or sums."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fusco.cuda.kernels.abi import Number


class RowAddresses(NamedTuple):
    """Addresses of what kernels read of rows."""

    # int32 (num_rows, num_topk): the slot of each pair; -1 if its expert is elsewhere, -2 if dropped
    row_to_slots: Number
    weights: Number  # float32 or float64 (num_rows, num_topk); 0 without weights
    # int32, for each row that this rank holds; bit ``r`` is set if rank ``r`` of the node owns an expert of it
    token_to_ranks: Number


class HeldRows(NamedTuple):
    """Rows in the pools of a node's ranks, and their slots on this rank."""

    # ``ranks_per_node + 1`` entries; rank ``r`` of the node holds rows ``first_row[r]`` to ``first_row[r + 1]``
    first_row: tuple[int, ...]
    addresses: RowAddresses
    num_topk: int  # experts per token (top-k)
    weight_bytes: int  # bytes of a weight; 0 without weights
    # copies, in the order of the addresses, unless the rows follow each other in the plan: no kernel needs views
    tensors: tuple[torch.Tensor, ...] = ()


def longest_of(first_row: tuple[int, ...]) -> int:
    """Return the maximum number of rows that a rank holds.

    >>> longest_of((0, 3, 3, 8))
    5
    """
    return max(end - first for first, end in itertools.pairwise(first_row))

"""Rows as a caller gives them, in the shape in which engines take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusco.api.handle import Handle


def as_list(x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the payloads of a dispatch, which are not looked at."""
    return list(x) if isinstance(x, (list, tuple)) else [x]  # type: ignore[list-item]  # checked with the payloads


def as_slots(rows: Any, handle: Any, least_dims: int = 2) -> Any:
    """Return masked rows (num_local_experts, rows_per_expert, ...) as (num_rows, ...); anything else as it is.

    Rows with fewer than ``least_dims`` dimensions are not masked: with one row for each expert, or no expert, both may
    have the same shape.
    """
    if type(handle) is not Handle or handle.plan.rows_per_expert is None:
        return rows
    if not isinstance(rows, torch.Tensor) or rows.is_nested or rows.ndim < least_dims:
        return rows
    if tuple(rows.shape[:2]) != handle.rows_shape:
        return rows
    return rows.flatten(0, 1)


def as_matrix(rows: Any, num_rows: int) -> Any:
    """Return rows of any shape as (num_rows, width), without their graph; anything else as it is, to be rejected."""
    if not isinstance(rows, torch.Tensor):
        return rows
    rows = rows.detach() if rows.requires_grad else rows
    if rows.ndim == 2 or not rows.ndim or len(rows) != num_rows:
        return rows
    return rows.flatten(1) if rows.ndim > 2 else rows.unsqueeze(1)

"""PyTorch twin of ``reduce_row``, for many rows at once."""

from __future__ import annotations

import torch


def reduce_rows(
    rows: torch.Tensor,
    row_to_first_term: torch.Tensor,
    term_to_row: torch.Tensor,
    term_weight: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Set ``sums[i]`` to the sum of ``term_weight[j] * rows[term_to_row[j]]`` over its terms ``j``, in order.

    Row ``i`` of ``sums``, ``accumulation_dtype(rows.dtype)`` (num_sums, hidden), has the terms
    ``row_to_first_term[i]`` to ``[i + 1]``.

    >>> sums, rows = torch.empty(2, 1), torch.tensor([[1.0], [10.0], [100.0]])
    >>> reduce_rows(rows, torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), sums)
    >>> sums.tolist()
    [[102.0], [30.0]]
    """
    sums.zero_()
    num_terms = row_to_first_term.diff()
    for position in range(int(num_terms.max()) if len(num_terms) else 0):
        out = (num_terms > position).nonzero().squeeze(1)
        term = row_to_first_term[out] + position
        sums[out] += term_weight[term, None] * rows[term_to_row[term]].to(sums.dtype)

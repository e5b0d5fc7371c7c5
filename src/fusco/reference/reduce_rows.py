"""PyTorch twin of ``reduce_rows``."""

from __future__ import annotations

import torch


def reduce_rows(
    rows: torch.Tensor,
    row_to_first_term: torch.Tensor,
    term_to_row: torch.Tensor,
    term_weight: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """See ``fusco.cpu.kernels.reduce_rows``."""
    sums.zero_()
    num_terms = row_to_first_term.diff()
    for position in range(int(num_terms.max()) if len(num_terms) else 0):
        out = (num_terms > position).nonzero().squeeze(1)
        term = row_to_first_term[out] + position
        sums[out] += term_weight[term, None] * rows[term_to_row[term]].to(sums.dtype)

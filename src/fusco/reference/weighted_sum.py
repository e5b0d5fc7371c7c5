"""PyTorch twin of ``weighted_sum``: gather rows and sum them with weights."""

from __future__ import annotations

import torch

from fusco.core.rows import accumulation_dtype


def weighted_sum(rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of the rows that each token names, in the dtype of the rows.

    Args:
        rows: (num_rows, hidden).
        row_idx: int64 (num_tokens, num_topk); an index outside of the rows contributes nothing.
        weights: (num_tokens, num_topk). Products and sums are float32 (float64 for float64 rows), in order of k.

    >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    >>> weighted_sum(rows, torch.tensor([[1, 0], [0, -1]]), torch.tensor([[0.5, 2.0], [3.0, 1.0]])).tolist()
    [[7.0, 14.0], [3.0, 6.0]]
    """
    wide = accumulation_dtype(rows.dtype)
    out = torch.zeros(len(row_idx), rows.shape[1], dtype=wide, device=rows.device)
    if not len(rows):
        return out.to(rows.dtype)
    is_there = (row_idx >= 0) & (row_idx < len(rows))
    for k in range(row_idx.shape[1]):
        terms = rows.index_select(0, row_idx[:, k].where(is_there[:, k], 0)).to(wide)
        out += terms.mul_(weights[:, k, None].to(wide)).masked_fill_(~is_there[:, k, None], 0)
    return out.to(rows.dtype)

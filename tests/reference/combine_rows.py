"""PyTorch twin of the CUDA kernel ``combine_rows``: partial sums of each rank, and final sums at the tokens' owners.

Kernel and twin multiply and add the same terms in the same order, in float32 (float64 for float64 rows). They round
each product, each sum and each sent value alike, so they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusco.core.rows import accumulation_dtype


def sum_partially(
    rows: torch.Tensor, row_to_slots: torch.Tensor, weights: torch.Tensor | None, wire_dtype: torch.dtype
) -> torch.Tensor:
    """Return what a rank sends to the owners of its rows' tokens: one partial sum per token, as ``wire_dtype``.

    Args:
        rows: bfloat16, float16, float32 or float64 (num_slots, hidden), expert-major.
        row_to_slots: int32 (num_tokens, num_topk); pairs with a negative slot have no term.
        weights: float32 or float64 (num_tokens, num_topk); ``None`` means one for all.
        wire_dtype: the dtype in which sums are sent; no narrower than ``rows``.

    Returns ``wire_dtype`` (num_tokens, hidden), zero for tokens without terms.

    >>> rows, slots = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32)
    >>> sum_partially(rows, slots, torch.tensor([[1.0, 2.0], [9.0, 3.0]]), torch.float32).tolist()
    [[102.0], [30.0]]
    """
    sums = rows.new_zeros(len(row_to_slots), rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    _add_terms(sums, rows, row_to_slots, weights)
    return sums.to(wire_dtype)


def combine_rows(
    rows: torch.Tensor,
    row_to_slots: torch.Tensor,
    weights: torch.Tensor | None,
    received: Mapping[int, torch.Tensor],
    token_to_ranks: torch.Tensor,
    rank: int,
) -> torch.Tensor:
    """Return the sums of a rank's tokens, added by ascending rank: local terms in order of k, others as partial sums.

    Args:
        rows: this rank's rows, as in ``sum_partially``.
        row_to_slots: for this rank's tokens, int32 (num_tokens, num_topk).
        weights: for this rank's tokens, float32 or float64 (num_tokens, num_topk), or ``None``.
        received: by rank, the result of ``sum_partially`` there for this rank's tokens.
        token_to_ranks: int32 (num_tokens,); bit ``r`` is set if rank ``r`` has a partial sum of the token.
            Entries of ``received`` without their bit are ignored.
        rank: this rank.

    Returns (num_tokens, hidden) of the dtype of ``rows``.

    Token 0 has rows on ranks 0 and 1, token 1 on rank 1 only, and rank 1 is this one.

    >>> rows, slots = torch.tensor([[1.0], [10.0]]), torch.tensor([[1, -1], [0, -1]], dtype=torch.int32)
    >>> combine_rows(rows, slots, None, {0: torch.tensor([[0.5], [9.0]])}, torch.tensor([3, 2]), rank=1).tolist()
    [[10.5], [1.0]]
    """
    sums = rows.new_zeros(len(row_to_slots), rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    for src in sorted({rank, *received}):
        if src == rank:
            _add_terms(sums, rows, row_to_slots, weights)
        else:
            is_received = (token_to_ranks >> src & 1).bool()
            sums[is_received] += received[src][is_received].to(sums.dtype)
    return sums.to(rows.dtype)


def _add_terms(
    sums: torch.Tensor, rows: torch.Tensor, row_to_slots: torch.Tensor, weights: torch.Tensor | None
) -> None:
    for k, slot in enumerate(row_to_slots.unbind(1)):
        has_slot = slot >= 0
        terms = rows[slot[has_slot].long()].to(sums.dtype)
        if weights is not None:
            terms = terms * weights[has_slot, k, None].to(sums.dtype)
        sums[has_slot] += terms

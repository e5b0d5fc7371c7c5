"""PyTorch twin of the CUDA kernel ``scatter_rows``, which moves rows in dispatch."""

from __future__ import annotations

import torch


def scatter_rows(rows: torch.Tensor, row_to_slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return expert-major rows: each row in all its slots, and zero in empty slots.

    Bits are moved unchanged, so kernel and twin agree exactly. (The kernel does not write the slots after the last
    block of a static output.)

    Args:
        rows: any dtype (num_rows, ...), the rows of all ranks, by source rank.
        row_to_slots: int32 (num_rows, num_topk); negative for pairs without a slot here. No slot occurs twice.
        num_slots: rows of the output.

    Returns (num_slots, ...) of the dtype of ``rows``.

    Row 0 goes to slots 2 and 0, row 1 to slot 3; row 2 was dropped, and slot 1 is padding.

    >>> slots = torch.tensor([[2, 0], [3, -1], [-2, -1]], dtype=torch.int32)
    >>> scatter_rows(torch.tensor([[7, 8], [5, 6], [3, 4]]), slots, num_slots=4).tolist()
    [[7, 8], [0, 0], [7, 8], [5, 6]]
    """
    out = rows.new_zeros(num_slots, *rows.shape[1:])
    for slot in row_to_slots.unbind(1):
        has_slot = slot >= 0
        out[slot[has_slot].long()] = rows[has_slot]
    return out

"""PyTorch twin of the CUDA kernel ``add_returned``: the last step of combine between nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_returned(
    own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the sums of tokens: over their node, plus the sums that other nodes returned; bit-identical to the kernel.

    Args:
        own: (num_tokens, hidden), as accumulated: float64, or float32 for all narrower rows.
        returned: for each other node, sums (num_returned, hidden) in the dtype in which they were sent.
        places: for each other node, int32 (num_tokens,): the index of a token's sum in ``returned``; -1 for none.
        dtype: the dtype of rows.

    Returns (num_tokens, hidden) of that dtype.

    >>> own = torch.tensor([[1.0], [2.0]])
    >>> add_returned(own, [torch.tensor([[10.0]])], [torch.tensor([-1, 0])], torch.float32).tolist()
    [[1.0], [12.0]]
    """
    sums = torch.zeros_like(own) + own  # not a copy: the kernel's sums start from zero, so -0.0 becomes 0.0
    for rows, of_token in zip(returned, places, strict=True):
        is_returned = of_token >= 0
        sums[is_returned] += rows[of_token[is_returned].long()].to(sums.dtype)
    return sums.to(dtype)

"""PyTorch twin of the CUDA kernel ``add_returned``: the last step of combine between nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_returned(
    own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """A token's sum over its own node, and the sums that other nodes sent back; the same bits as the kernel's.

    Args:
        own: (num_tokens, hidden), as accumulated: float64, or float32 for all narrower rows.
        returned: for each other node, sums (num_returned, hidden) in the dtype in which they travelled.
        places: for each other node int32 (num_tokens,): where a token's sum stands there; -1 if nothing came back.
        dtype: of the rows.

    Returns (num_tokens, hidden) of that dtype.

    >>> own = torch.tensor([[1.0], [2.0]])
    >>> add_returned(own, [torch.tensor([[10.0]])], [torch.tensor([-1, 0])], torch.float32).tolist()
    [[1.0], [12.0]]

    """
    sums = torch.zeros_like(own) + own  # not a copy: the kernel's sums start from zero, which has a sign
    for rows, of_token in zip(returned, places, strict=True):
        comes = of_token >= 0
        sums[comes] += rows[of_token[comes].long()].to(sums.dtype)
    return sums.to(dtype)

"""PyTorch twin of ``weight_gradients``: combine's backward, rows of gradients times their weights, and dots."""

from __future__ import annotations

import torch


def weight_gradients(
    grads: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``fusco.api.autograd.weight_gradients``; returns new rows, and the dot products."""
    wide = torch.promote_types(grads.dtype, torch.float32)
    dots = None if rows is None else torch.linalg.vecdot(grads.to(wide), rows.to(wide))
    # In the wider dtype, so that weights are not rounded to 16 bits first.
    return (grads * weights[:, None]).to(grads.dtype), dots

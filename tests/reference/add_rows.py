"""PyTorch twin of ``add_rows``."""

from __future__ import annotations

import torch


def add_rows(rows: torch.Tensor, row_to_sum: torch.Tensor, sums: torch.Tensor) -> None:
    """See ``fusco.cpu.kernels.add_rows``."""
    sums[row_to_sum] += rows.to(sums.dtype)

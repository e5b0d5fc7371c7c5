"""PyTorch twin of ``copy_segments``."""

from __future__ import annotations

import torch


def copy_segments(
    src: torch.Tensor, src_offset: torch.Tensor, dst: torch.Tensor, dst_offset: torch.Tensor, num_bytes: torch.Tensor
) -> None:
    """See ``fusco.cuda.kernels.copy_segments``."""
    for origin, to, size in zip(src_offset.tolist(), dst_offset.tolist(), num_bytes.tolist(), strict=True):
        dst[to : to + size] = src[origin : origin + size]

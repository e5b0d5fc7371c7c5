"""What kernels are told of the elements and the accesses that rows are moved by."""

from __future__ import annotations

import torch

ELEMENT_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


def vector_bytes(row_bytes: int) -> int:
    """The widest access that divides a row."""
    return min(16, row_bytes & -row_bytes)

"""What the structs that kernels take are made of."""

from __future__ import annotations

import ctypes

import torch

U32, I32, I64, U64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
POINTER = ctypes.c_uint64  # as an integer, so that torch's addresses fit without a cast


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor stands; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()

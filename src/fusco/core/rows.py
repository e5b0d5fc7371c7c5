"""Tensors as rows that are moved."""

from __future__ import annotations

import torch

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of ``dtype`` are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_ALIGNMENT = 16  # bytes of the widest access of a kernel's


def row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one row of (num_rows, ...).

    >>> row_bytes(torch.empty(0, 3, 2, dtype=torch.int16))
    12
    """
    return rows.shape[1:].numel() * rows.dtype.itemsize


def describe_rows(rows: torch.Tensor) -> str:
    """Their dtype and the shape of each.

    >>> describe_rows(torch.empty(5, 4, dtype=torch.int16))
    'int16[4]'
    """
    return f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape[1:])}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and as they are in memory; without a gradient."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same, on a multiple of 16 bytes."""
    same = plain(tensor)
    return same if same.data_ptr() % _ALIGNMENT == 0 else same.clone()


def wants_grad(tensor: torch.Tensor | None) -> bool:
    """Whether a gradient will be asked for."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 (num_bytes,); without a gradient.

    Not by ``view(-1)``: a contiguous tensor of one element or of none may have any strides, which views refuse.

    >>> as_bytes(torch.ones(4, 3, dtype=torch.int16)[:1, 1]).tolist()
    [1, 0]
    """
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

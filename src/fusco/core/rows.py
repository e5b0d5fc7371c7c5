"""Rows: dtypes, sizes and memory of tensors that fusco moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_ALIGNMENT = 16  # bytes of a kernel's widest access


def row_bytes(rows: torch.Tensor) -> int:
    """Return the bytes of one row of a tensor (num_rows, ...).

    >>> row_bytes(torch.empty(0, 3, 2, dtype=torch.int16))
    12
    """
    return rows.shape[1:].numel() * rows.element_size()


def expert_rows_shape(num_slots: int, rows_per_expert: int | None) -> tuple[int, ...]:
    """Return the leading dimensions of expert-major rows: all slots, or those of each expert.

    >>> expert_rows_shape(12, None), expert_rows_shape(12, 4)
    ((12,), (3, 4))
    """
    return (num_slots,) if rows_per_expert is None else (num_slots // rows_per_expert, rows_per_expert)


def describe_rows(rows: torch.Tensor) -> str:
    """Return dtype and shape of one row, as text.

    >>> describe_rows(torch.empty(5, 4, dtype=torch.int16))
    'int16[4]'
    """
    return f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape[1:])}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is what ``plain`` would return: contiguous, with its values, without a gradient."""
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory holds the same values, without a gradient: the same one if it is so."""
    if is_plain(tensor):
        return tensor
    own = tensor.detach().resolve_conj().resolve_neg()
    if own.element_size() > 1:
        return own.contiguous()
    return own.view(torch.uint8).contiguous().view(own.dtype)  # PyTorch cannot copy int4 and its like


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``plain(tensor)`` at an address that is a multiple of 16 bytes."""
    same = plain(tensor)
    return same if same.data_ptr() % _ALIGNMENT == 0 else same.clone()


def wants_grad(tensor: torch.Tensor | None) -> bool:
    """Return whether autograd records operations on this tensor."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def allocator_of(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Return a function that allocates a tensor of a shape, strides and a dtype on a device, if it is the current one.

    That of PyTorch's compiler takes half the time of ``torch.empty_strided``, and is not public.
    """
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)  # noqa: SLF001

    def allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return quick or allocate


def count_as_changed(tensor: torch.Tensor) -> None:
    """Count a change in place, as PyTorch's operations do, so that a backward pass that needs the old values raises."""
    if not tensor.is_inference():  # which has no count
        torch.autograd.graph.increment_version(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, uint8 (num_bytes,); without a gradient.

    ``view(-1)`` would fail: a contiguous tensor of at most one element may have any strides.

    >>> as_bytes(torch.ones(4, 3, dtype=torch.int16)[:1, 1]).tolist()
    [1, 0]
    """
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

"""Rows: dtypes, sizes and memory of tensors that fusco moves; others would fail inside a collective, or crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ALIGNMENT = 16  # bytes of a kernel's widest access
# Modes in which PyTorch traces instead of computing; tensors made inside have no memory.
_TRACING_MODES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))  # noqa: SLF001  as below
_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


# PyTorch has no public query for modes and transforms; both functions are in all releases since 2.1.


def why_nothing_moves_here() -> str:
    """Return why no tensor can be moved in the caller's context, and what to do; ``""`` if tensors can be moved."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return (
            "was called inside a transform of torch.func (grad, vmap, jvp, ...), which communication cannot pass "
            "through; call it outside, and take gradients by backward()"
        )
    has_modes = torch._C._len_torch_dispatch_stack()  # noqa: SLF001  rarely any, so the rest costs nothing
    if has_modes and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES):  # noqa: SLF001
        return "was called while PyTorch traces (FakeTensorMode, make_fx, ...), where tensors have no memory"
    return ""


def require_movable_tensors(verb: str) -> None:
    """Raise ``TypeError`` if a verb is called inside a transform or a trace, with ``why_nothing_moves_here``."""
    if why_not := why_nothing_moves_here():
        raise TypeError(f"{verb} {why_not}")


def why_not_movable(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be moved as bytes, and what to do, as a predicate of its name; ``""`` if it can.

    >>> why_not_movable(torch.ones(2)), why_not_movable(torch.ones(2).to_sparse())
    ('', 'must be a dense tensor, got layout torch.sparse_coo')
    """
    return _why_not_its_own(tensor) or _why_not_bytes(tensor)


def _why_not_its_own(tensor: torch.Tensor) -> str:
    """Return why the tensor is a wrapper whose memory is not its value; ``""`` if it is a plain tensor."""
    functorch = torch._C._functorch  # noqa: SLF001
    if functorch.is_legacy_batchedtensor(tensor):
        return "is a batch of tensors (is_grads_batched=True, vectorize=True), which communication cannot pass through"
    if functorch.is_functorch_wrapped_tensor(tensor):
        return "is of a transform of torch.func (grad, vmap, jvp, ...), which communication cannot pass through"
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        return "has a tangent of forward-mode differentiation, which communication cannot pass on; use backward()"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(tensor).__name__}, a tensor subclass without its own memory; pass the plain tensor inside "
            f"(to_local() of a DTensor, wait() of an AsyncCollectiveTensor)"
        )
    return ""


def _why_not_bytes(tensor: torch.Tensor) -> str:
    """Return why the memory does not hold the tensor's values; ``""`` if it does."""
    if tensor.layout != torch.strided:
        return f"must be a dense tensor, got layout {tensor.layout}"
    if tensor.is_nested:
        return "is a nested tensor, whose rows differ in size; pass its values as one dense tensor"
    if tensor.is_quantized or tensor.dtype in _QUANTISED:
        return f"is quantised ({tensor.dtype}), and its scale would not be moved; pass int_repr() and the scale apart"
    if not has_memory(tensor):
        return f"has {tensor.nbytes} bytes of elements, but its storage has {tensor.untyped_storage().nbytes()}"
    return ""


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage contains the last element; it may have been freed under the tensor, as FSDP does."""
    first, num_bytes = tensor.storage_offset() * tensor.element_size(), bytes_needed(tensor)
    return not num_bytes or first + num_bytes <= tensor.untyped_storage().nbytes()


def bytes_needed(tensor: torch.Tensor) -> int:
    """Return the bytes of memory from a tensor's first element to the end of its last one.

    >>> bytes_needed(torch.zeros(3, 4, dtype=torch.int16)), bytes_needed(torch.zeros(3, 4)[:, 1])
    (24, 36)
    """
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():  # as a rule, and quicker
        return tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()

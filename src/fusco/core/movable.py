"""Checks that a tensor can be moved as the bytes of its memory; others would fail inside a collective, or crash."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# Modes in which PyTorch traces instead of computing; tensors made inside have no memory.
_TRACING_MODES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))  # noqa: SLF001  as below

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)

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

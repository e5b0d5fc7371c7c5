"""Memory of callers as bytes, without a copy."""

from __future__ import annotations

from typing import Any


def as_bytes(buffer: Any, *, writable: bool) -> memoryview:
    """Return the bytes of a buffer or of a contiguous tensor on the CPU; the memoryview shares its memory.

    Raises ``TypeError`` for anything else, ``ValueError`` for memory that is not contiguous or may not be written.
    """
    if hasattr(buffer, "data_ptr"):
        buffer = _tensor_memory(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"a buffer or a tensor is needed, got {type(buffer).__name__}") from None
    if not view.c_contiguous:
        raise ValueError(f"a buffer must be contiguous, got shape {view.shape} with strides {view.strides}")
    if writable and view.readonly:
        raise ValueError("a buffer to receive into must be writable, got a read-only one")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _tensor_memory(tensor: Any) -> Any:
    import torch  # noqa: PLC0415  only for callers that have tensors, so it is loaded

    from fusco.core.movable import why_not_movable  # noqa: PLC0415  imports torch

    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor must be on the CPU, got one on {tensor.device}")
    if why_not := why_not_movable(tensor):
        raise TypeError(f"a tensor {why_not}")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor must be contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()

"""``copy_to_host`` and ``copy_from_host``: validation, and the copier of each GPU."""

from __future__ import annotations

import threading
from functools import cache

import torch

from fusco.offload.copier import Copier
from fusco.offload.copy import Copy
from fusco.offload.mover import FROM_HOST, TO_HOST

_LOCK = threading.Lock()  # so that threads make a GPU's copier once


def copy_to_host(tensor: torch.Tensor, pinned: torch.Tensor, *, copier: Copier | None = None) -> Copy:
    """Copy a CUDA tensor to pinned host memory, also over the PCIe links of idle GPUs of this host.

    The copy begins after all work of the current stream so far; later work does not wait for it unless ``Copy.wait`` is
    called. Both tensors are kept until it is done, and must not be written before.

    Args:
        tensor: a contiguous CUDA tensor.
        pinned: a contiguous tensor in pinned memory, of the same dtype and shape.
        copier: a copier of the tensor's GPU; by default one for each GPU, made at the first copy.

    Returns:
        The copy, which is under way.

    Raises:
        TypeError, ValueError: for tensors that are neither, or differ, with both values.
        RuntimeError: while the stream is captured into a CUDA graph.
        LaunchError: if CUDA fails.
    """
    return _copy(TO_HOST, tensor, pinned, copier)


def copy_from_host(tensor: torch.Tensor, pinned: torch.Tensor, *, copier: Copier | None = None) -> Copy:
    """Copy pinned host memory to a CUDA tensor; otherwise as ``copy_to_host``.

    The tensor's memory must be free to be written in the order of the current stream, as it is after ``torch.empty``.
    """
    return _copy(FROM_HOST, tensor, pinned, copier)


def copier_of(device: torch.device | int) -> Copier:
    """Return the copier that ``copy_to_host`` and ``copy_from_host`` use for a GPU by default; made when first used.

    Raises as ``Copier``.
    """
    index = device if isinstance(device, int) else device.index
    with _LOCK:
        return _copier(torch.cuda.current_device() if index is None else index)


@cache
def _copier(device: int) -> Copier:
    return Copier(device)


def _copy(direction: int, tensor: torch.Tensor, pinned: torch.Tensor, copier: Copier | None) -> Copy:
    check_tensors(tensor, pinned, copier)
    with torch.cuda.device(tensor.device):  # the copy is ordered by the current stream of this GPU
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "copies over several PCIe links cannot be captured into a CUDA graph; copy before or after it"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    copier = copier or copier_of(tensor.device)
    return copier.copy(direction, tensor.data_ptr(), pinned.data_ptr(), num_bytes, keeps=(tensor, pinned))


def check_tensors(tensor: torch.Tensor, pinned: torch.Tensor, copier: Copier | None = None) -> None:
    """Check the two tensors of a copy; raises ``TypeError`` or ``ValueError`` with the values."""
    for name, value in (("tensor", tensor), ("pinned", pinned)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if tensor.device.type != "cuda":
        raise ValueError(f"tensor must be on a CUDA device, got {tensor.device}")
    if copier is not None and tensor.device.index != copier.device:
        raise ValueError(f"tensor is on {tensor.device}, but the copier is that of cuda:{copier.device}")
    if pinned.device.type != "cpu":
        raise ValueError(f"pinned must be a CPU tensor in pinned memory, got one on {pinned.device}")
    if not pinned.is_pinned():
        raise ValueError(
            f"pinned must be in pinned memory; make it with pin_memory=True, got {tuple(pinned.shape)} pageable"
        )
    _check_same(tensor, pinned)


def _check_same(tensor: torch.Tensor, pinned: torch.Tensor) -> None:
    for what in ("dtype", "shape"):
        values = [getattr(each, what) for each in (tensor, pinned)]
        if values[0] != values[1]:
            raise ValueError(f"tensor and pinned must have one {what}, got {values[0]} and {values[1]}")
    for name, value in (("tensor", tensor), ("pinned", pinned)):
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(value.shape)} and strides {value.stride()}")

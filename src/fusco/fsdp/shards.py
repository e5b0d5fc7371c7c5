"""Parts and values of sharded tensors; plain tensors are whole on every rank."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Part = tuple[slice, ...]


def local_part(tensor: torch.Tensor) -> Part:
    """Return the slices of a tensor that are on this rank."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values on this rank, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks; a collective of the ranks that share a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def device_type_of(tensor: torch.Tensor) -> str:
    """Return the type of device that communicates a tensor's values, also if they are offloaded to main memory."""
    return str(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device.type

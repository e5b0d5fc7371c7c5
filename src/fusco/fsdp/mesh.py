"""The two meshes of expert parallelism on FSDP2, for dense parameters and for experts, and parts of sharded tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Part = tuple[slice, ...]


@dataclass(frozen=True)
class EPMesh:
    """Two meshes of the same ranks; every rank has a different batch.

    Attributes:
        dense: ("dp_replicate", "fsdp"), for everything but experts.
        expert: ("dp_replicate", "efsdp", "ep"). Ranks of an "ep" group are consecutive and own different experts; ranks
            of an "efsdp" group share the parameters of the same experts.
    """

    dense: DeviceMesh
    expert: DeviceMesh

    @property
    def ep_size(self) -> int:
        """Ranks among which the experts are distributed."""
        return self.expert.size(2)

    @property
    def efsdp_size(self) -> int:
        """Ranks among which each expert's parameters are sharded."""
        return self.expert.size(1)

    @property
    def dp_replicate(self) -> int:
        """Number of copies of the model."""
        return self.expert.size(0)

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """This rank's group for dispatch and combine."""
        return self.expert["ep"].get_group()

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.expert.device_type

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """The mesh of FSDP for dense parameters: one dimension, or two to replicate as well (HSDP)."""
        return self.dense if self.dp_replicate > 1 else self.dense["fsdp"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh of FSDP for experts."""
        return self.expert["dp_replicate", "efsdp"] if self.dp_replicate > 1 else self.expert["efsdp"]


def build_mesh(ep_size: int, dp_replicate: int = 1, *, device_type: str | None = None) -> EPMesh:
    """Arrange the ranks of the default process group; a collective.

    With 8 ranks, ``build_mesh(2)`` shards dense parameters among all 8 and each expert among 4; ``build_mesh(2,
    dp_replicate=2)`` keeps two copies of the model on 4 ranks each, with dense parameters sharded among 4 and each
    expert among 2.

    Args:
        ep_size: ranks among which a layer's experts are distributed; consecutive, so that they share a node if it is
            large enough.
        dp_replicate: copies of the model (HSDP).
        device_type: ``"cpu"`` or ``"cuda"``; ``None`` means CUDA if available.

    Raises:
        ValueError: without a process group, or if ``ep_size * dp_replicate`` does not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    world_size = dist.get_world_size()
    for name, value in (("ep_size", ep_size), ("dp_replicate", dp_replicate)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if world_size % (ep_size * dp_replicate):
        raise ValueError(
            f"ep_size={ep_size} times dp_replicate={dp_replicate} does not divide the {world_size} ranks of the "
            f"default process group"
        )
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    fsdp_size = world_size // dp_replicate
    return EPMesh(
        dense=init_device_mesh(device_type, (dp_replicate, fsdp_size), mesh_dim_names=("dp_replicate", "fsdp")),
        expert=init_device_mesh(
            device_type, (dp_replicate, fsdp_size // ep_size, ep_size), mesh_dim_names=("dp_replicate", "efsdp", "ep")
        ),
    )


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

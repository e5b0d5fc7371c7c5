"""Loss and norm of gradients of all ranks: scaled and summed, on different meshes, and clipped."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusco.fsdp.mesh import EPMesh, device_type_of, local_values
from fusco.fsdp.wrapping import is_whole_copy


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; a collective of all ranks.

    As ``torch.nn.utils.clip_grad_norm_``, which in PyTorch 2.13 rejects parameters on different meshes. Missing
    gradients count as zero; ranks may miss different ones.

    Args:
        parameters: of a parallelized model, the same ones on all ranks; or one of them.
        max_norm: the largest norm allowed.
        norm_type: which p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise ``RuntimeError``, on all ranks, if the norm is infinite or not a number.

    Returns:
        The norm before clipping: float64, without dimensions, equal on all ranks.

    Raises:
        RuntimeError: see ``error_if_nonfinite``.
        ValueError: as ``grad_norm``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = grad_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped by it"
        )
    # The same epsilon as in torch, against division by zero.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in map(_local_grad, parameters):
        if grad is not None:
            grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


def grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of all ranks together, as ``clip_grad_norm_`` does; a collective.

    Raises:
        ValueError: for a ``norm_type`` that is not positive, and between a forward pass with gradients and its backward
            pass, where some of a model's parameters are whole copies.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    num_whole = sum(map(is_whole_copy, parameters))
    if num_whole:
        raise ValueError(
            f"{num_whole} of {len(parameters)} parameters are whole copies without gradients, as after a forward pass "
            f"without its backward pass: evaluate in torch.no_grad(), after which they are sharded again"
        )
    # Meshes are taken from parameters, in their order, so that ranks agree even if some gradients are missing.
    mesh_to_parameters: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        mesh_to_parameters.setdefault(_where(parameter), []).append(parameter)
    totals = []
    for (mesh, sharded_dims), group in mesh_to_parameters.items():
        total = _local_total(group, norm_type).to(device_type_of(group[0]))
        for dim in sharded_dims:
            assert mesh is not None
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(total, op, mesh.get_group(dim))
        totals.append(total)
    if not totals:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    stacked = torch.stack(totals)
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def _where(parameter: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return a parameter's mesh, and the mesh dimensions along which it is sharded."""
    if not isinstance(parameter, DTensor):
        return None, ()
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return parameter.device_mesh, tuple(sharded)


def _local_total(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of p-th powers of this rank's gradients (their maximum, if p is infinite), in float64."""
    total = torch.zeros((), dtype=torch.float64, device=local_values(parameters[0]).device)
    for parameter in parameters:
        grad = _local_grad(parameter)
        if grad is None or not grad.numel():
            continue
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type
    return total


@torch.no_grad()
def _local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return None if parameter.grad is None else local_values(parameter.grad)


def scale_loss(loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, mesh: EPMesh) -> torch.Tensor:
    """Divide this rank's *sum* of losses by the number of tokens of all ranks; a collective.

    The results of all ranks add up to the mean loss (``global_sum`` adds them, for logging). Since ``parallelize`` adds
    gradients, ``backward`` computes the gradient of that mean.

    Args:
        loss_sum: the sum of this rank's losses; zero for a rank without tokens.
        num_tokens: the number of losses in that sum, without ignored labels.
        mesh: from ``build_mesh``.

    Returns:
        This rank's part of the mean: float32 (float64, if the sum is), since 16 bits cannot hold large counts.
    """
    wide = torch.promote_types(loss_sum.dtype, torch.float32)
    return loss_sum.to(wide) / global_sum(num_tokens, mesh).clamp(min=1).to(wide)


def global_sum(value: float | torch.Tensor, mesh: EPMesh) -> torch.Tensor:
    """Return the sum of a number, such as a count of tokens, over all ranks: float64, on the mesh's device.

    A collective.
    """
    total = torch.as_tensor(value, dtype=torch.float64, device=mesh.device_type).detach().clone()
    dist.all_reduce(total)
    return total

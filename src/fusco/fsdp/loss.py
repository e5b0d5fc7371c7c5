"""The mean loss over the tokens of all ranks; ranks may have different numbers of tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusco.fsdp.mesh import EPMesh


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

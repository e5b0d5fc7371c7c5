"""Check that all ranks start from the same weights, which sharding assumes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def check_equal_weights(model: nn.Module, device_type: str) -> None:
    """Compare a sum of every parameter among all ranks of the default group; a collective.

    Parameters on the meta device have no values; they must be on it on all ranks, and are skipped.

    Raises:
        ValueError: on all ranks, with the first parameter that differs.
    """
    named = list(model.named_parameters())
    has_values = torch.tensor([not parameter.is_meta for _, parameter in named], dtype=torch.int64, device=device_type)
    if differs := _differing(has_values):
        raise ValueError(
            f"parameter {named[differs[0]][0]} has values on some ranks and is on the meta device on others "
            f"({len(differs)} of {len(named)} are): make the model in the same way on all ranks"
        )
    named = [(name, parameter) for name, parameter in named if not parameter.is_meta]
    if not named:
        return
    sums = torch.stack([parameter.detach().sum(dtype=torch.float64).to(device_type) for _, parameter in named])
    if differs := _differing(sums.view(torch.int64)):
        raise ValueError(
            f"parameter {named[differs[0]][0]} differs between ranks ({len(differs)} of {len(named)} do): every "
            f"rank must start from the same weights, so use one seed or load the same file"
        )


def _differing(values: torch.Tensor) -> list[int]:
    """Return the indices at which the values of ranks are not all equal; a collective."""
    lowest, highest = values.clone(), values.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    differs: list[int] = (lowest != highest).nonzero().flatten().tolist()
    return differs

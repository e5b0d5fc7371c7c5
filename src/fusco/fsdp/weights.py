"""Whether all ranks start from the same weights, which sharding takes for granted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def check_equal_weights(model: nn.Module, device_type: str) -> None:
    """Compare a sum of every parameter among all ranks of the default group; a collective.

    Parameters on the meta device have no values and are passed over.

    Raises:
        ValueError: on all ranks, with the first parameter that differs.

    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    if not named:
        return
    sums = torch.stack([parameter.detach().sum(dtype=torch.float64) for _, parameter in named])
    bits = sums.to(device_type).view(torch.int64)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    differs = (lowest != highest).nonzero()
    if len(differs):
        raise ValueError(
            f"parameter {named[int(differs[0])][0]} differs between ranks ({len(differs)} of {len(named)} do): every "
            f"rank must start from the same weights, so seed all alike or load the same file"
        )

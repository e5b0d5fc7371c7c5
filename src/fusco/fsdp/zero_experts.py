"""Zero experts, as those of LongCat-Flash: experts without weights, which return the rows that they get.

Their ids follow those of the others. transformers (5.24) has rows of ``gate_up_proj`` for them, which nothing uses:
``parallelize`` cuts them off, and files get zeros in their place.
"""

from __future__ import annotations

import torch
from torch import nn

from fusco.fsdp.layer import layer_of


def cut_rows(model: nn.Module) -> dict[str, int]:
    """Return the number of rows that ``parallelize`` has cut off, by name of parameter."""
    layers = {name: layer for name, module in model.named_modules() if (layer := layer_of(module))}
    return {
        f"{name}.{layer.experts.up_name}": layer.experts.num_zero_experts
        for name, layer in layers.items()
        if layer.experts.num_zero_experts
    }


def with_zeros(stack: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a stack with zeros in place of rows that were cut off."""
    return torch.cat([stack, stack.new_zeros(num_rows, *stack.shape[1:])])

"""Optimizers that cannot step on sharded parameters are named, with a way out."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

# With PyTorch 2.13 their steps end in errors of ``DTensor`` that name no optimizer.
_UNSHARDED = (torch.optim.Adafactor, torch.optim.Rprop)
_FUSED_UNSHARDED = (torch.optim.SGD, torch.optim.Adagrad)


def refuse_unsharded_optimizers(model: nn.Module) -> None:
    """Make the step of an optimizer that fails on the model's sharded parameters raise ``ValueError`` before it begins.

    PyTorch's hook is called for the steps of all optimizers, those of other models included, and ends with the model.
    """
    reference = weakref.ref(model)

    def check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        obstacle = _obstacle(optimizer)
        living = reference() if obstacle else None
        if living is None:
            return
        sharded = {id(parameter) for parameter in living.parameters() if isinstance(parameter, DTensor)}
        if any(id(parameter) in sharded for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"{obstacle} cannot step on parameters that FSDP2 shards (DTensor): use torch.optim.AdamW, or another "
                f"optimizer of the table in docs/training/runs.md"
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(model, handle.remove)


def _obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name if it cannot step on sharded parameters, else nothing."""
    name = f"torch.optim.{type(optimizer).__name__}"
    if isinstance(optimizer, _UNSHARDED):
        return name
    if isinstance(optimizer, _FUSED_UNSHARDED) and any(group.get("fused") for group in optimizer.param_groups):
        return f"{name} with fused=True"
    return ""

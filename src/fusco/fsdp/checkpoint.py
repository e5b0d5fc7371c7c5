"""Checkpoints of a parallelized model that load into any other number of ranks, ``ep_size`` or sharding dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# By parameter names, not by their order: so each optimizer state has the layout of its parameter.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write model and optimizer into a folder, each rank its own part; a collective of all ranks."""
    save(_state(model, optimizer), checkpoint_id=path)


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what ``save_checkpoint`` wrote, each rank its own part; a collective of all ranks.

    Args:
        path: the folder.
        model: parallelized in whatever way, or not at all, in a process of its own.
        optimizer: of its parameters; of the same kind, and with as many parameter groups, as the one that was saved.

    """
    state = _state(model, optimizer)
    load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )


def save_hugging_face(path: str | Path, model: nn.Module) -> None:
    """Write a folder that ``from_pretrained`` reads; a collective of all ranks.

    Rank 0 gathers and writes all weights, so that its main memory must hold them.

    Args:
        path: the folder.
        model: a parallelized model of transformers.

    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_pretrained: Any = model.save_pretrained
        save_pretrained(path, state_dict=weights)
    dist.barrier()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}

"""Checkpoints of a parallelized model that load into any other number of ranks, ``ep_size`` or sharding dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# By parameter names, not by their order: so each optimizer state has the layout of its parameter.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write model and optimizer, if given, into a folder, each rank its own part; a collective of all ranks."""
    save(_state(model, optimizer), checkpoint_id=path)


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what ``save_checkpoint`` wrote, each rank its own part; a collective of all ranks.

    Args:
        path: the folder.
        model: parallelized in whatever way, or not at all, in a process of its own.
        optimizer: of its parameters; of the same kind, and with as many parameter groups, as the one that was saved.
            ``None`` loads the model only, whether an optimizer was saved or not.

    """
    state = _state(model, optimizer)
    load(state, checkpoint_id=path)
    if optimizer is None:
        set_model_state_dict(model, state["model"])
    else:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
        )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}

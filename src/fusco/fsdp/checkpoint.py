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


def save_hugging_face(path: str | Path, model: nn.Module) -> None:
    """Write a folder that ``from_pretrained`` reads; a collective of all ranks.

    Rank 0 gathers and writes all weights, so that its main memory must hold them.

    Args:
        path: the folder.
        model: a parallelized model of transformers.

    Raises:
        TypeError: for another model.
        OSError: if rank 0 cannot write, which raises what it met with.

    """
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        raise TypeError(f"{type(model).__name__} has no save_pretrained: it is no model of transformers")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            save_pretrained(path, state_dict=weights)
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait to hear of it
            failure = error
    outcome = [repr(failure) if failure else ""]
    dist.broadcast_object_list(outcome, src=0)
    if failure:
        raise failure
    if outcome[0]:
        raise OSError(f"rank 0 could not write {path}: {outcome[0]}")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}

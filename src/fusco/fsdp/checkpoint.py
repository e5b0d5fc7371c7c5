"""Checkpoints of a parallelized model that load into any other number of ranks, ``ep_size`` or sharding dimension."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fusco.fsdp.checkpoint_writer import METADATA, CheckpointWriter
from fusco.fsdp.checks import on_all_ranks
from fusco.fsdp.optimizer_state import (
    drop_state,
    fill_state,
    find_unstarted,
    parameters_named,
    without_empty_groups,
    without_state,
)

# Keyed by parameter name, not by order, so each optimizer state has the layout of its parameter.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the model, and the optimizer if given, into a folder, each rank its part; a collective of all ranks.

    The folder's earlier checkpoint is the one that loads until the new one is complete, whatever fails. Then its files
    are removed. Those of a save that failed are removed by the next one.

    Raises:
        OSError: on all ranks, if one of them cannot write.
        ValueError: on all ranks, if a value cannot be written.
    """
    write_checkpoint(path, on_all_ranks(lambda: capture_checkpoint(model, optimizer)))


def write_checkpoint(path: str | Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write what ``capture_checkpoint`` returned, as ``save_checkpoint``; a collective of the group, by default all."""
    with _as_errors(f"{path} cannot be written"):
        save(state, storage_writer=CheckpointWriter(path), process_group=group)


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what ``save_checkpoint`` wrote, each rank its part; a collective of all ranks.

    Args:
        path: the folder.
        model: parallelized with any mesh and options, or a plain model in a single process.
        optimizer: of its parameters; of the same kind, and with as many parameter groups, as the one that was saved.
            Parameters that had no gradient before saving have no state in the checkpoint, and none after loading.
            ``None`` loads the model only, whether an optimizer was saved or not.

    Raises:
        OSError: on all ranks, if one of them cannot read.
        ValueError: on all ranks, for a checkpoint of another model, or of another optimizer or none.
    """
    filled: list[nn.Parameter] = []

    def prepare() -> tuple[dict[str, Any], set[str]]:
        if optimizer:
            filled.extend(fill_state(optimizer))
        state = capture_checkpoint(model, optimizer)
        return state, _check(Path(path), state)

    try:
        state, unstarted = on_all_ranks(prepare)
        if optimizer is None:
            _load(path, state)
            set_model_state_dict(model, state["model"])
            return
        state["optimizer"] = without_state(state["optimizer"], unstarted)
        _load(path, state)
        parameters = parameters_named(model, unstarted)
        drop_state(optimizer, parameters)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        with without_empty_groups(optimizer):
            set_state_dict(model, optimizer, **states, options=_OPTIONS)
        drop_state(optimizer, parameters)  # PyTorch has created empty states for them
    except Exception:
        if optimizer:
            drop_state(optimizer, filled)
        raise


def capture_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the tensors and values of a checkpoint, not copied: this rank's part of them."""
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def _check(path: Path, state: dict[str, Any]) -> set[str]:
    """Return the names of parameters without optimizer state in a checkpoint; all else must be the same in both."""
    if not (path / METADATA).exists():
        raise ValueError(f"{path} has no {METADATA}: no save_checkpoint into it was completed")
    try:
        saved = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    except Exception as error:  # any error must reach the other ranks
        raise ValueError(f"{path}/{METADATA} cannot be read: {error!r}") from error
    names, saved_names = set(state["model"]), {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    if missing := names - saved_names:
        raise ValueError(f"{len(missing)} weights of the model are not in {path}, such as {min(missing)}")
    if unknown := saved_names - names:
        raise ValueError(f"{len(unknown)} weights in {path} are not in the model, such as {min(unknown)}")
    if "optimizer" not in state:
        return set()
    of_optimizer = [key.removeprefix("optimizer.") for key in saved if key.startswith("optimizer.")]
    if not of_optimizer:
        raise ValueError(f"{path} has no optimizer: load it without one")
    return find_unstarted(state["optimizer"], of_optimizer)


def _load(path: str | Path, state: dict[str, Any]) -> None:
    with _as_errors(f"{path} cannot be read"):
        load(state, checkpoint_id=path)


@contextmanager
def _as_errors(what: str) -> Iterator[None]:
    """Raise a rank's failure as an ``Exception``; PyTorch's is a ``BaseException`` with the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as failed:
        rank, (cause, _) = min(failed.failures.items(), key=lambda failure: failure[0])
        kind = OSError if isinstance(cause, OSError) else ValueError
        raise kind(f"{what}: rank {rank} failed with {type(cause).__name__}: {cause}") from cause

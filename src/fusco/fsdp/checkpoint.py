"""Checkpoints of a parallelized model that load into any other number of ranks, ``ep_size`` or sharding dimension."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fusco.fsdp.checks import on_all_ranks

# Keyed by parameter name, not by order, so each optimizer state has the layout of its parameter.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
METADATA = ".metadata"  # the file that says where the tensors of a checkpoint are
# Parts of names from torch.compile and checkpoint wrappers, which PyTorch strips in checkpoints.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


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


class CheckpointWriter(FileSystemWriter):
    """Writes every checkpoint into files of its own; renaming its ``.metadata`` puts it in place of the earlier one.

    PyTorch's writer (2.13) writes into the files of the earlier checkpoint, which loads as a mixture of both if a rank
    fails meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _Renaming()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose names of files, on one rank for all, and remove what earlier saves left."""
        self._remove_unused()
        save = uuid4().hex
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{save}{plan.storage_data.prefix}"))
            for plan in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, on one rank; all have written their files."""
        super().finish(metadata, results)
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Remove files of tensors that are not of the folder's checkpoint."""
        folder = Path(self.path)
        used = _files_of(folder)
        for file in folder.glob("__*.distcp"):
            if file.name not in used:
                file.unlink(missing_ok=True)


class _Renaming(FileSystem):
    """Files that do not exist before they are renamed: PyTorch (2.13) removes the old ``.metadata`` first."""

    def exists(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002  the signature is PyTorch's
        return False


def _files_of(folder: Path) -> set[str]:
    """Return the names of the files of the folder's checkpoint; none if it has none that can be read."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (FileNotFoundError, EOFError, UnpicklingError):
        return set()
    return {each.relative_path for each in (metadata.storage_data or {}).values()}


def fill_state(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Create the state of every trainable parameter, and return the parameters that had none.

    As PyTorch (2.13) before loading, it takes a step with zero gradients and learning rate zero; but PyTorch does so
    only if no parameter has a state or a gradient. Gradients are left unchanged, and everything if the step raises.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    empty = [each for each in parameters if each.requires_grad and not optimizer.state.get(each)]
    if not empty:
        return []
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in empty:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    except BaseException:
        drop_state(optimizer, empty)
        raise
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return empty


@contextmanager
def without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take parameter groups without parameters out of an optimizer, for the duration of the block.

    PyTorch (2.13) cannot load a flattened state into them. transformers' ``Trainer`` makes one where all trained
    parameters have weight decay, as adapters do.
    """
    groups = list(optimizer.param_groups)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        loaded = iter(optimizer.param_groups)  # loading replaces groups
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]


def drop_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Remove the state of parameters, as before their first gradient."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def find_unstarted(wanted: Iterable[str], saved: Iterable[str]) -> set[str]:
    """Return the names of parameters without state in a checkpoint, because they never had a gradient.

    ``wanted`` are the keys of this optimizer's flattened state, ``state.<parameter>.<what>`` and
    ``param_groups.<parameter>.<what>``; ``saved`` those in the checkpoint. Raises ``ValueError`` if the checkpoint's
    optimizer was of another kind, or had other parameters.
    """
    options, saved_options = _by_parameter(wanted, "param_groups"), _by_parameter(saved, "param_groups")
    for name, keys in options.items():
        if lacking := keys - saved_options.get(name, set()):
            raise ValueError(
                f"the checkpoint's optimizer has no {min(lacking)} for parameter {name}: it was of another kind, or "
                f"had other parameters"
            )
    state, saved_state = _by_parameter(wanted, "state", options), _by_parameter(saved, "state", options)
    for name, keys in saved_state.items():
        # A parameter without state here may have been frozen since; but not all of them.
        if keys != state.get(name, set() if not state else keys):
            raise ValueError(
                f"the checkpoint's optimizer has {', '.join(sorted(keys))} for parameter {name}, and this one "
                f"{', '.join(sorted(state.get(name, ()))) or 'nothing'}: it was of another kind"
            )
    return state.keys() - saved_state.keys()


def parameters_named(model: nn.Module, names: set[str]) -> list[nn.Parameter]:
    """Return a model's parameters by their names in checkpoints."""
    return [parameter for name, parameter in model.named_parameters() if _WRAPPERS.sub("", name) in names]


def without_state(state: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a flattened state without the entries of some parameters."""
    return {key: value for key, value in state.items() if not _split(key, "state", names)}


def _by_parameter(keys: Iterable[str], section: str, names: Container[str] | None = None) -> dict[str, set[str]]:
    """Return the entries of one section for each parameter."""
    found: dict[str, set[str]] = {}
    for key in keys:
        if parts := _split(key, section, names):
            found.setdefault(parts[0], set()).add(parts[1])
    return found


def _split(key: str, section: str, names: Container[str] | None) -> tuple[str, str] | None:
    """Split a key into parameter and entry; without names, the entry is the last part."""
    if not key.startswith(f"{section}."):
        return None
    parts = key.split(".")[1:]
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if names is None or name in names:
            return name, ".".join(parts[length:])
    return None

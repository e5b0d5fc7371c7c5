"""Optimizer state per parameter: filled before loading, and compared with a checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Parts of names from torch.compile and checkpoint wrappers, which PyTorch strips in checkpoints.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


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

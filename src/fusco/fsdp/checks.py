"""Checks before a model is distributed: on all ranks together, of its parameters, and of equal weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

_Result = TypeVar("_Result")


def on_all_ranks(
    function: Callable[[], _Result], group: dist.ProcessGroup | None = None, *, of_first: bool = False
) -> _Result:
    """Call a function on all ranks and return its result, or that on rank 0; a collective of the group.

    Raises its error on this rank; if it fails on other ranks only, ``OSError`` or ``ValueError`` naming one of them.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as failure:  # noqa: BLE001  raised again, once all ranks know
        error = failure
    if dist.is_initialized() and (num_ranks := dist.get_world_size(group)) > 1:
        outcomes: list[Any] = [None] * num_ranks
        said = f"{type(error).__name__}: {error}" if error else ""
        dist.all_gather_object(outcomes, (said, isinstance(error, OSError), result if of_first else None), group)
        failed = [(rank, *outcome[:2]) for rank, outcome in enumerate(outcomes) if outcome[0]]
        if failed and error is None:
            rank, text, is_os_error = failed[0]
            raise (OSError if is_os_error else ValueError)(f"rank {rank} failed with {text}")
        if of_first and not failed:
            result = outcomes[0][2]
    if error:
        raise error
    return cast("_Result", result)


def check_parameters(model: nn.Module, wrapped: Iterable[nn.Module]) -> None:
    """Raise ``ValueError``, with its name, for a parameter that FSDP cannot shard, or shards more than once.

    FSDP shards a parameter once for each module that it wraps; each copy is then trained and saved separately. Within
    one module, such as embeddings and output weights of the root, it stays one parameter. What it refuses, it refuses
    when experts are distributed already, or in the first forward pass. The root ``model`` is not sharded yet.
    """
    units = set(wrapped)
    first: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    innermost: dict[str, nn.Module] = {}
    unit_to_trained: dict[nn.Module, tuple[str, torch.dtype]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        enclosing = innermost.get(prefix.rpartition(".")[0], model)
        innermost[prefix] = unit = module if module in units else enclosing
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}".removeprefix(".")
            known, its_unit = first.setdefault(parameter, (name, unit))
            if its_unit is not unit:
                raise ValueError(
                    f"{known} and {name} are one parameter, but FSDP shards their modules separately, which would "
                    f"train two copies: untie them, or parallelize one of these modules alone"
                )
            _check_layout(name, parameter)
            trained, dtype = unit_to_trained.get(unit, (name, parameter.dtype))
            if parameter.requires_grad:
                unit_to_trained[unit] = trained, dtype
                if dtype != parameter.dtype:
                    raise ValueError(
                        f"{trained} is {dtype} and {name} is {parameter.dtype}, but FSDP needs one dtype of all "
                        f"parameters that it trains in a {type(unit).__name__}: cast the model (model.to(dtype); "
                        f"Sharding(mixed_precision=...) chooses the dtype to compute in), or freeze the others"
                    )


def _check_layout(name: str, parameter: nn.Parameter) -> None:
    if not parameter.ndim:
        raise ValueError(f"{name} has no dimension for FSDP to shard: give it the shape (1,)")
    if not parameter.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, but FSDP shards contiguous "
            f"parameters only: set its .data to its .data.contiguous()"
        )


def check_equal_weights(model: nn.Module, device_type: str) -> None:
    """Compare a sum of every parameter among all ranks of the default group; a collective.

    Parameters on the meta device have no values; they must be on it on all ranks, and are skipped. Raises
    ``ValueError`` on all ranks, with the first parameter that differs.
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
    return (lowest != highest).nonzero().flatten().tolist()

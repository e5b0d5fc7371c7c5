"""Checkpoints saved into one folder again and again while ranks are killed, or have no room on their disk."""

from __future__ import annotations

import resource
import warnings
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fusco import fsdp

LARGEST_FILE = 30_000  # bytes, less than a rank of four writes of the model below


def save_until_failure(
    _: dist.ProcessGroup, path: Path, progress: Path, victim: int, first_to_fail: int, room: int
) -> None:
    """Save the values 1, 2, ...; ``progress`` gets a file with the name of each save that has returned on this rank.

    From save ``first_to_fail`` on, rank ``victim`` has room for ``room`` bytes of a file; -1 for any number.
    """
    model = _sharded()
    for value in count(1):
        _fill(model, value)
        if value == first_to_fail and room >= 0 and dist.get_rank() == victim:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        fsdp.save_checkpoint(path, model)
        (progress / f"{value}").touch()


def values_in(path: Path) -> set[float]:
    """Return the values that a folder's checkpoint has, loaded in this process; and save them again."""
    model = _plain()
    _fill(model, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there is no process group
        fsdp.load_checkpoint(path, model)
        fsdp.save_checkpoint(path, model)
    return _values(model)


def _plain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=idx % 2 == 0) for idx in range(8)))


def _sharded() -> nn.Module:
    model, mesh = _plain(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        _local(parameter).fill_(value)


def _values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in _local(parameter).detach().flatten().tolist()}

"""Checkpoints saved into one folder again and again while ranks are killed, or have no room on their disk."""

from __future__ import annotations

import resource
import warnings
from itertools import count
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fusco import fsdp

_LARGEST_FILE = 200_000  # bytes, more than a rank writes


def save_until_killed(_: dist.ProcessGroup, path: Path, progress: Path) -> None:
    """Save the values 1, 2, ...; ``progress`` gets a file with the name of each save that has returned on this rank."""
    model = _sharded()
    for value in count(1):
        _fill(model, value)
        fsdp.save_checkpoint(path, model)
        (progress / f"{value}").touch()


def save_on_a_full_disk(_: dist.ProcessGroup, path: Path, victim: int, num_saves: int, name: str) -> tuple[int, int]:
    """Save with room for a part of a file on one rank; check what loads after each; return saves that failed, and all.

    The values are 1, 2, ...; the last one that was saved stays.
    """
    model, random, complete, failed = _sharded(), Random(name), 0, 0
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for value in range(1, num_saves + 1):
        _fill(model, value)
        room = random.randrange(_LARGEST_FILE)
        try:
            if dist.get_rank() == victim and value > 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            fsdp.save_checkpoint(path, model)
            complete = value
        except OSError:
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        _fill(model, -1)
        fsdp.load_checkpoint(path, model)
        found = _values(model)
        assert found <= {complete}, f"save {value} with room for {room} bytes on rank {victim}: loads {found}"
    return failed, complete


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

"""Functions on ranks, or in a process alone: train, save, load elsewhere, train on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Batch, loss_sum, make_model, num_targets, together
from fsdp_runs import Run, dispatcher_of, mesh_of, whole_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW

from fusco import fsdp
from fusco.fsdp.checkpoint import CheckpointWriter
from fusco.fsdp.hugging_face import _Files, _Source

_SEQUENCES = (2, 2, 2, 2)
_MMAP_THRESHOLD = -3  # of mallopt


@dataclass(frozen=True)
class State:
    """Return whole parameters and optimizer moments, now and after one more step."""

    now: dict[str, torch.Tensor]
    later: dict[str, torch.Tensor]


def save(_: dist.ProcessGroup, run: Run, path: Path) -> State:
    """Train two steps and save."""
    with _trainer(run) as (model, optimizer):
        for index in range(2):
            _step(model, optimizer, index)
        fsdp.save_checkpoint(path, model, optimizer)
        return _state_and_next(model, optimizer)


def save_on_a_full_disk(_: dist.ProcessGroup, path: Path) -> tuple[str, list[State]]:
    """Save, save again with no room on rank 1, load, and save again; return the error and the states to compare."""
    with _trainer(Run()) as (model, optimizer):
        _step(model, optimizer, 0)
        fsdp.save_checkpoint(path, model, optimizer)
        states = [_state(model, optimizer)]
        _step(model, optimizer, 1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match="cannot be written") as error:
            fsdp.save_checkpoint(path, model, optimizer)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        fsdp.load_checkpoint(path, model, optimizer)
        states.append(_state(model, optimizer))
        _step(model, optimizer, 1)
        fsdp.save_checkpoint(path, model, optimizer)
        return str(error.value), states


def be_killed_in_save(_: dist.ProcessGroup, path: Path, rank: int) -> None:
    """Train further and save; one rank is killed when it has written a part of its file."""
    with _trainer(Run()) as (model, optimizer):
        fsdp.load_checkpoint(path, model, optimizer)
        _step(model, optimizer, 2)
        written = CheckpointWriter.write_data

        def killed(*arguments: Any) -> Any:
            future = written(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            return future

        if dist.get_rank() == rank:
            CheckpointWriter.write_data = killed
        fsdp.save_checkpoint(path, model, optimizer)


def loaded(_: dist.ProcessGroup, path: Path) -> dict[str, torch.Tensor]:
    """Return what a checkpoint has."""
    with _trainer(Run(ep_size=1)) as (model, optimizer):
        fsdp.load_checkpoint(path, model, optimizer)
        return _state(model, optimizer)


def load(_: dist.ProcessGroup, run: Run, path: Path) -> State:
    """Load into a model that was trained differently."""
    with _trainer(run) as (model, optimizer):
        _step(model, optimizer, 5)
        fsdp.load_checkpoint(path, model, optimizer)
        return _state_and_next(model, optimizer)


def load_from_meta(_: dist.ProcessGroup, run: Run, path: Path) -> State:
    """Load into a model made on the meta device."""
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    with dispatcher_of(run, mesh) as dispatcher:
        with fsdp.parameters_on_meta():
            model = make_model(run.kind)
        assert all(parameter.is_meta for parameter in model.parameters())
        fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(expert_dim=run.expert_dim))
        fsdp.materialize(model, "cpu")
        optimizer = _optimizer(model)
        fsdp.load_checkpoint(path, model, optimizer)
        return _state_and_next(model, optimizer)


def load_without_optimizer(
    _: dist.ProcessGroup, run: Run, path: Path, model_path: Path
) -> tuple[dict[str, torch.Tensor], ...]:
    """Load the model of a checkpoint with an optimizer, save it without one, load that."""
    with _trainer(run) as (model, _):
        fsdp.load_checkpoint(path, model)
        fsdp.save_checkpoint(model_path, model)
    with _trainer(run) as (again, _):
        fsdp.load_checkpoint(model_path, again)
    return [{name: whole_of(p) for name, p in each.named_parameters()} for each in (model, again)]


def load_export(_: dist.ProcessGroup, run: Run, path: Path, **changes: int) -> tuple[dict[str, torch.Tensor], int]:
    """Read files of transformers into a meta-device model; return also the largest number of elements read."""
    mesh, sizes = mesh_of(run.ep_size, run.dp_replicate), []
    read = _Source.read

    def watched(self: _Source, files: _Files, *more: Any) -> Any:
        sizes.append(0)
        return read(self, files, *more)

    def reading(self: _Files, *what: Any) -> torch.Tensor:
        tensor = read_file(self, *what)
        sizes[-1] += tensor.numel()
        return tensor

    read_file = _Files.read
    with fsdp.parameters_on_meta():
        model = make_model(run.kind, **changes)
    sharding = fsdp.Sharding(expert_dim=run.expert_dim)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group), sharding)
    with pytest.raises(ValueError, match=r"has no memory: call fusco\.fsdp\.materialize first"):
        fsdp.load_hugging_face(path, model)
    fsdp.materialize(model, "cpu")
    with mock.patch.object(_Source, "read", watched), mock.patch.object(_Files, "read", reading):
        fsdp.load_hugging_face(path, model)
    return {name: whole_of(tensor) for name, tensor in model.state_dict().items()}, max(sizes)


def errors_of_import(_: dist.ProcessGroup, kind: str, path: Path) -> dict[str, str]:
    """Return the errors for files without the model's weights."""
    mesh = mesh_of(2, 1)
    model = make_model(kind)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    errors = {}
    for name in ("missing", "shape", "quantized", "nothing"):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            fsdp.load_hugging_face(path / name, model)
        errors[name] = str(error.value)
    return errors


def errors_of_export(_: dist.ProcessGroup, path: Path) -> tuple[str, str]:
    """Return the errors on all ranks if rank 0 cannot write, and for a model that is not of transformers."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError("this disk is full")

    with _trainer(Run()) as (model, _):
        model.save_pretrained = fail
        with pytest.raises(OSError, match="this disk is full") as error:
            fsdp.save_hugging_face(path, model)
        with pytest.raises(TypeError) as type_error:
            fsdp.save_hugging_face(path, model.model.layers[0])
    return str(error.value), str(type_error.value)


def load_alone(path: Path) -> State:
    """Load into a plain model, in a process without a group."""
    model = make_model("qwen3")
    optimizer = _optimizer(model)
    fsdp.load_checkpoint(path, model, optimizer)
    return _state_and_next(model, optimizer)


def export(_: dist.ProcessGroup, run: Run, path: Path) -> dict[str, torch.Tensor]:
    """Write for transformers; return the whole weights."""
    with _trainer(run) as (model, optimizer):
        _step(model, optimizer, 0)
        fsdp.save_hugging_face(path, model)
        return {name: whole_of(tensor) for name, tensor in model.state_dict().items()}


def export_files(_: dist.ProcessGroup, run: Run, path: Path, max_file_bytes: int) -> None:
    """Write for transformers, in the smallest parts."""
    with _trainer(run) as (model, _), mock.patch("fusco.fsdp.gathered_parts._SMALL_BYTES", 0):
        fsdp.save_hugging_face(path, model, max_file_bytes=max_file_bytes)


def memory_of_export(_: dist.ProcessGroup, path: Path) -> tuple[int, int, int]:
    """Return the bytes of a rank's shards and of a whole layer, and by how much an export raises resident memory."""
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # what is freed is given back
    mesh = mesh_of(2, 1)
    fsdp.save_hugging_face(path / "imports", _parallelized(mesh))
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 16, "moe_intermediate_size": 256}
    model = _parallelized(mesh, **sizes)
    share = sum(parameter.to_local().nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _resident_bytes("VmRSS")
    fsdp.save_hugging_face(path / "model", model)
    return share, layer, _resident_bytes("VmHWM") - before


def _parallelized(mesh: fsdp.EPMesh, **sizes: int) -> nn.Module:
    model = make_model("qwen3", **sizes)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    return model


def _resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


@contextlib.contextmanager
def _trainer(run: Run) -> Iterator[tuple[nn.Module, AdamW]]:
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    with dispatcher_of(run, mesh) as dispatcher:
        model = make_model(run.kind)
        fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(expert_dim=run.expert_dim))
        yield model, _optimizer(model)


def _optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: AdamW, index: int) -> None:
    """Return this rank's part of a batch that does not depend on the number of ranks."""
    whole = together(_SEQUENCES, index)
    mine = whole
    if dist.is_initialized():
        ids, labels = (t.tensor_split(dist.get_world_size())[dist.get_rank()] for t in (whole.ids, whole.labels))
        mine = Batch(ids, labels)
    (loss_sum(model, mine) / num_targets(whole)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state_and_next(model: nn.Module, optimizer: AdamW) -> State:
    now = _state(model, optimizer)
    _step(model, optimizer, 2)
    return State(now, _state(model, optimizer))


def _state(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    tensors = {name: value for name, value in moments.items() if isinstance(value, torch.Tensor)}
    return {name: whole_of(tensor) for name, tensor in {**dict(model.named_parameters()), **tensors}.items()}

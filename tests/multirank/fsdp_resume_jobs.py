"""Functions on ranks: checkpoints without optimizer state for some parameters, and of other models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_architectures import make_root
from fsdp_models import make_model
from fsdp_runs import mesh_of, whole_of
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from fusco import fsdp

# Selects tokens by values that no gradient comes from.
INDEXER = "indexer"


@dataclass(frozen=True)
class Moments:
    """Return whole parameters and their optimizer state, after loading and after one more step."""

    loaded: dict[str, torch.Tensor]
    stepped: dict[str, torch.Tensor]


def resume(_: dist.ProcessGroup, path: Path) -> list[Moments]:
    """Return the states of the run that saved, with a new optimizer, and with one that has seen every gradient."""
    saved = _parallel(_make(), 2)
    optimizer = _step(saved, AdamW(saved.parameters()))
    fsdp.save_checkpoint(path, saved, optimizer)
    outcomes = [_go_on(saved, optimizer)]
    for has_stepped in (False, True):
        model = _parallel(_make(), 2)
        optimizer = AdamW(model.parameters())
        if has_stepped:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        fsdp.load_checkpoint(path, model, optimizer)
        outcomes.append(_go_on(model, optimizer))
    return outcomes


def resume_alone(path: Path) -> dict[str, torch.Tensor]:
    """Load into a plain model, in a process without a group."""
    model = _make()
    optimizer = AdamW(model.parameters())
    fsdp.load_checkpoint(path, model, optimizer)
    return _moments(model, optimizer)


def errors(_: dist.ProcessGroup, path: Path) -> dict[str, str]:
    """Return the errors for checkpoints of other models and optimizers, and for a missing folder."""
    model = _parallel(make_model("qwen3"), 2)
    fsdp.save_checkpoint(path / "model", model)
    fsdp.save_checkpoint(path / "whole", model, AdamW(model.parameters()))
    broken = path / f"{dist.get_rank()}"
    broken.mkdir()
    (broken / ".metadata").write_bytes(b"")
    (path / "file").touch()
    mistakes = {
        "without an optimizer": (path / "model", AdamW, {}),
        "of another optimizer": (path / "whole", lambda weights: SGD(weights, momentum=0.9), {}),
        "of another model": (path / "whole", AdamW, {"num_hidden_layers": 3}),
        "of a larger model": (path / "whole", AdamW, {"num_hidden_layers": 1}),
        "of other sizes": (path / "whole", AdamW, {"moe_intermediate_size": 4}),
        "of nothing": (path / "nothing", AdamW, {}),
        "broken": (broken, AdamW, {}),
        "without memory on rank 1": (path / "whole", _FullOptimizer, {}),
        "of nothing on rank 1": (path / ("nothing" if dist.get_rank() else "whole"), AdamW, {}),
    }
    texts = {what: _error(*mistake) for what, mistake in mistakes.items()}
    with pytest.raises(ValueError, match="no memory for moments" if dist.get_rank() else "rank 1 failed"):
        fsdp.save_checkpoint(path / "not written", model, _FullOptimizer(model.parameters()))
    with pytest.raises(OSError, match="cannot be written") as error:
        fsdp.save_checkpoint(path / "file" / "below", model)
    return {**texts, "nowhere": str(error.value)}


class _FullOptimizer(AdamW):
    """Has no memory for its moments on rank 1."""

    def step(self, closure: object = None) -> None:
        if dist.get_rank():
            raise ValueError("no memory for moments")
        super().step(closure)


def _error(path: Path, make_optimizer: Callable[..., Optimizer], changes: dict[str, int]) -> str:
    model = _parallel(make_model("qwen3", **changes), 2)
    optimizer = make_optimizer(model.parameters())
    with pytest.raises(ValueError) as error:  # noqa: PT011  the text is looked at by the test
        fsdp.load_checkpoint(path, model, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return str(error.value)


def _make() -> nn.Module:
    model = make_root(transformers.GlmMoeDsaForCausalLM)
    assert any(INDEXER in name for name, _ in model.named_parameters())
    return model


def _parallel(model: nn.Module, ep_size: int) -> nn.Module:
    mesh = mesh_of(ep_size, 1)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    return model


def _step(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """The same batch on all ranks."""
    ids = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if INDEXER in name:
            parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _go_on(model: nn.Module, optimizer: Optimizer) -> Moments:
    now = _moments(model, optimizer)
    _step(model, optimizer)
    return Moments(now, _moments(model, optimizer))


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    moments = {}
    for name, parameter in model.named_parameters():
        moments[name] = whole_of(parameter)
        for what, value in optimizer.state.get(parameter, {}).items():
            moments[f"{name}.{what}"] = whole_of(value)
    return moments

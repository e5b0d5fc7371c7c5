"""Functions on ranks: models with adapters of peft, parallelized, written, read and merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from fsdp_models import loss_sum, make_batch, make_model, num_targets, together
from fsdp_runs import Run, difference, dispatcher_of, mesh_of, whole_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusco import fsdp

_SEQUENCES = (1, 2, 1, 3)
_PLAIN = Run(dispatcher="torch", nums_sequences=_SEQUENCES)


@dataclass(frozen=True)
class Merged:
    """Return the whole weights of a merged model, its logits, and the error of calling it alone."""

    weights: dict[str, torch.Tensor]
    logits: torch.Tensor
    error: str


def make_adapted(kind: str = "qwen3", **changes: Any) -> nn.Module:
    """Return a model with random adapters."""
    return adapt(make_model(kind), **changes)


def adapt(model: nn.Module, seed: int = 5, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    options = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**{**options, **changes}))


def differences_of_gradients(_: dist.ProcessGroup, run: Run = _PLAIN, **changes: Any) -> dict[str, float]:
    """Of adapters, from one process with the batches of all ranks; the base model is frozen."""
    sequences = _SEQUENCES[: dist.get_world_size()]
    expected, whole = make_adapted(**changes), together(sequences)
    (loss_sum(expected, whole) / num_targets(whole)).backward()
    mesh, model = mesh_of(run.ep_size, 1), make_adapted(**changes)
    with dispatcher_of(run, mesh) as dispatcher:
        sharding = fsdp.Sharding(expert_dim=run.expert_dim)
        fsdp.parallelize(
            model, mesh, dispatcher, sharding, activation_checkpointing=run.recomputes, balance=run.balance
        )
        batch = make_batch(dist.get_rank(), sequences[dist.get_rank()])
        (loss_sum(model, batch) / num_targets(whole)).backward()
    trained = {name: each.grad for name, each in expected.named_parameters() if each.requires_grad}
    return {name: difference(model.get_parameter(name).grad, grad) for name, grad in trained.items()}


def logits_without_adapters(_: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return a model's logits with adapters on experts, with them disabled, and without them again."""
    model, ids, logits = _parallel(make_adapted(target_modules="all-linear")), make_batch(0, 1).ids, {}
    with torch.no_grad():
        logits["with"] = model(input_ids=ids).logits
        with model.disable_adapter():
            logits["disabled"] = model(input_ids=ids).logits
        model.unload()
        logits["unloaded"] = model(input_ids=ids).logits
    return logits


def error_of_merging_broken_adapters(_: dist.ProcessGroup) -> str:
    """Return the error for an adapter with a value that is not a number, on any rank."""
    model = make_adapted(target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.mlp.experts.lora_A.default.weight")[0, 0] = float("nan")
    model = _parallel(model)
    with pytest.raises(ValueError, match="not a number") as error:
        model.merge_and_unload(safe_merge=True)
    return str(error.value)


def export(_: dist.ProcessGroup, path: Path, **changes: Any) -> list[str]:
    """Write adapters; return the names of what is gathered for that."""
    model = _parallel(make_adapted(**changes))
    with mock.patch.object(model, "save_pretrained", wraps=model.save_pretrained) as save:
        fsdp.save_hugging_face(path, model)
    return list(save.call_args.kwargs["state_dict"]) if save.called else []


def read(
    _: dist.ProcessGroup, path: Path, is_on_meta: bool, kind: str = "qwen3", **changes: Any
) -> dict[str, torch.Tensor]:
    """Read weights below adapters into a model with others, or with none; return all."""
    if is_on_meta:
        with fsdp.parameters_on_meta():
            model = make_adapted(kind, **changes)
    else:
        plain = make_model(kind)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.fill_(0.5)
        model = adapt(plain, **changes)
    model = _parallel(model)
    if is_on_meta:
        fsdp.materialize(model, "cpu")
    fsdp.load_hugging_face(path, model)
    return {name: whole_of(tensor) for name, tensor in model.state_dict().items()}


def adapters_on_meta(_: dist.ProcessGroup, path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the adapters of a model that never was whole, and the difference of its logits from the plain model's."""
    torch.manual_seed(dist.get_rank())
    with fsdp.parameters_on_meta():
        model = adapt(make_model("qwen3"), **changes)
    _parallel(model)
    fsdp.materialize(model, "cpu")
    fsdp.load_hugging_face(path, model)
    with torch.no_grad():
        logits = model(input_ids=make_batch(0, 1).ids).logits
    return {name: whole_of(each) for name, each in model.state_dict().items() if "lora_" in name} | {"logits": logits}


def error_of_reading(_: dist.ProcessGroup, path: Path, **changes: Any) -> str:
    """Return the error for adapters that depend on the weights below them."""
    model = _parallel(make_adapted(**changes))
    with pytest.raises(ValueError, match="may depend on") as error:
        fsdp.load_hugging_face(path, model)
    return str(error.value)


def merge(_: dist.ProcessGroup, path: Path, safe_merge: bool, expert_dim: int = 1, **changes: Any) -> Merged:
    """Merge adapters after a forward pass, call both models, and write the merged one."""
    model, ids = _parallel(make_adapted(**changes), expert_dim), make_batch(0, 1).ids
    with torch.no_grad():
        model(input_ids=ids)
    merged = model.merge_and_unload(safe_merge=safe_merge)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    with pytest.raises(ValueError, match="are gathered by") as error:
        merged(input_ids=ids)
    fsdp.save_hugging_face(path, merged)
    return Merged({name: whole_of(tensor) for name, tensor in merged.state_dict().items()}, logits, str(error.value))


def error_of_merging_whole_copies(_: dist.ProcessGroup) -> str:
    """Return the error between a forward pass with gradients and its backward pass."""
    model = _parallel(make_adapted(target_modules=["lm_head"]))
    model(input_ids=make_batch(0, 1).ids)
    with pytest.raises(ValueError, match="would be lost") as error:
        model.merge_and_unload()
    return str(error.value)


def error_of_data_parallel(_: dist.ProcessGroup) -> str:
    """Return the error of what Trainer, accelerate and Fabric wrap models with."""
    model = _parallel(make_model("qwen3"))
    with pytest.raises(TypeError, match="cannot wrap") as error:
        DistributedDataParallel(model)
    return str(error.value)


def _parallel(model: nn.Module, expert_dim: int = 1) -> nn.Module:
    mesh = mesh_of(2, 1)
    sharding = fsdp.Sharding(expert_dim=expert_dim)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group), sharding)
    return model

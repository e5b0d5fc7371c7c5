"""Functions on ranks: experts through the interfaces of transformers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_models import SEQUENCE, alone, loss_sum, make_batch, make_model, num_targets, together
from fsdp_runs import LIMIT_S, difference, mesh_of
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fusco import Settings, fsdp


def differences_through_transformers(
    _: dist.ProcessGroup, path: Path, ep_size: int, tp_size: int = 1
) -> dict[str, float]:
    """As ``differences_of_gradients``, for a model that transformers has distributed."""
    nums_sequences = (2, 1, 3, 1)[: 4 // tp_size]
    reference = alone("qwen3", nums_sequences)
    config = importlib.import_module("transformers.distributed").DistributedConfig(
        fsdp_size=4 // tp_size, tp_size=tp_size, ep_size=ep_size, ep_implementation="fusco"
    )
    settings = Settings(timeout_s=LIMIT_S, slice_bytes=1 << 16)
    with fsdp.registered_with_transformers(3 * SEQUENCE, settings=settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        index = dist.get_rank() // tp_size
        batch = make_batch(index, nums_sequences[index])
        # transformers averages gradients over ranks with different batches.
        loss = loss_sum(model, batch) * len(nums_sequences) / num_targets(together(nums_sequences))
        loss.backward()
        return {name: difference(model.get_parameter(name).grad, grad) for name, grad in reference.grads.items()}


def differences_through_experts_functions(
    _: dist.ProcessGroup, kind: str, ep_size: int, **options: Any
) -> dict[str, float]:
    """As ``differences_of_gradients``, for a distributed model that calls fusco by its name."""
    nums_sequences = (2, 1, 3, 1)
    reference = alone(kind, nums_sequences)
    mesh = mesh_of(ep_size, 1)
    model = make_model(kind)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            local = distribute_tensor(parameter.detach(), mesh.expert["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(local))
        fully_shard(experts, mesh=mesh.expert["efsdp"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=mesh.dense["fsdp"])
    fully_shard(model, mesh=mesh.dense["fsdp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    settings = Settings(timeout_s=LIMIT_S, slice_bytes=1 << 16)
    with fsdp.registered_as_experts_implementation(mesh.ep_group, 3 * SEQUENCE, settings=settings, **options):
        model.set_experts_implementation("fusco")
        batch = make_batch(dist.get_rank(), nums_sequences[dist.get_rank()])
        (loss_sum(model, batch) / num_targets(together(nums_sequences))).backward()
        differences = {name: difference(model.get_parameter(name).grad, grad) for name, grad in reference.grads.items()}
    with pytest.raises(ValueError, match='experts_implementation="fusco"` is not supported'):
        make_model(kind).set_experts_implementation("fusco")
    return differences


@contextlib.contextmanager
def doubled_experts() -> Iterator[None]:
    """Make the eager forward pass of Qwen3-MoE's experts return twice its output."""
    forward = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe").Qwen3MoeExperts.forward
    original = forward.__wrapped__
    with mock.patch.object(forward, "__wrapped__", lambda *args: 2 * original(*args)):
        yield


def error_of_another_formula_through_transformers(_: dist.ProcessGroup, path: Path) -> str:
    """Return the error of ``from_pretrained`` for experts that compute another formula."""
    config = importlib.import_module("transformers.distributed").DistributedConfig(
        fsdp_size=4, ep_size=2, ep_implementation="fusco"
    )
    with (
        doubled_experts(),
        fsdp.registered_with_transformers(SEQUENCE, settings=Settings(timeout_s=LIMIT_S)),
        pytest.raises(ValueError, match="computes something else") as error,
    ):
        transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    return str(error.value)


def error_of_another_formula_by_name(_: dist.ProcessGroup) -> str:
    """Return the error of a model's first forward pass for experts that compute another formula."""
    model, group = make_model("qwen3"), mesh_of(1, 1).ep_group
    with (
        doubled_experts(),
        fsdp.registered_as_experts_implementation(group, SEQUENCE, settings=Settings(timeout_s=LIMIT_S)),
    ):
        model.set_experts_implementation("fusco")
        with pytest.raises(ValueError, match="computes something else") as error:
            loss_sum(model, make_batch(0, 1))
    return str(error.value)


def check_that_models_go(_: dist.ProcessGroup) -> None:
    """A model that has called fusco by name is not kept alive by that."""
    settings = Settings(timeout_s=LIMIT_S, slice_bytes=1 << 16)
    with fsdp.registered_as_experts_implementation(mesh_of(1, 1).ep_group, SEQUENCE, settings=settings):
        model = make_model("mixtral")
        model.set_experts_implementation("fusco")
        with torch.no_grad():
            loss_sum(model, make_batch(0, 1))
        experts = weakref.ref(model.model.layers[0].mlp.experts)
        assert experts() is not None
        del model
        gc.collect()
        assert experts() is None

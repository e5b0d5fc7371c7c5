"""Functions on ranks: a model on expert parallelism and FSDP2, against the same model in one process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_models import (
    SEQUENCE,
    alone,
    loss_sum,
    make_batch,
    make_model,
    make_starved_model,
    num_targets,
    step_alone,
    together,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fusco import ClosedError, Settings, fsdp

LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A parallelized model and its batches.

    Attributes:
        kind: of model.
        ep_size, dp_replicate: of the mesh.
        expert_dim: that FSDP shards.
        dispatcher: ``"fusco"``, ``"torch"``, or ``"drops a token"``.
        nums_sequences: of each rank's batch.
        is_starved: leave half of the experts without any token.
        recomputes: how activations of blocks are computed again: ``"full"``, ``"selective"``, or by transformers.
        divides: keep FSDP's divide factor, and scale the loss to match dense parameters.

    """

    kind: str = "qwen3"
    ep_size: int = 2
    dp_replicate: int = 1
    expert_dim: int = 1
    dispatcher: str = "fusco"
    nums_sequences: tuple[int, ...] = (2, 1, 3, 1)
    divides: bool = False
    is_starved: bool = False
    recomputes: Literal["none", "full", "selective", "by transformers"] = "none"


class DroppingDispatcher(fsdp.TorchDispatcher):
    """Loses the first token of rank 1 on its way to one of its experts."""

    def dispatch(self, x, topk_idx, topk_weights, num_experts):
        if dist.get_rank() == 1:
            topk_idx = topk_idx.clone()
            topk_idx[0, 0] = -1
        return super().dispatch(x, topk_idx, topk_weights, num_experts)


@lru_cache(maxsize=16)
def mesh_of(ep_size: int, dp_replicate: int) -> fsdp.EPMesh:
    """Return a mesh on the device of the ranks; ranks with GPUs use NCCL."""
    device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    return fsdp.build_mesh(ep_size, dp_replicate, device_type=device_type)


@contextlib.contextmanager
def dispatcher_of(run: Run, mesh: fsdp.EPMesh) -> Iterator[fsdp.Dispatcher]:
    if run.dispatcher == "fusco":
        settings = Settings(timeout_s=LIMIT_S, slice_bytes=1 << 16)
        max_tokens = max(4, *run.nums_sequences) * SEQUENCE
        with fsdp.FuscoDispatcher(mesh.ep_group, max_tokens, settings=settings) as dispatcher:
            yield dispatcher
    else:
        yield {"torch": fsdp.TorchDispatcher, "drops a token": DroppingDispatcher}[run.dispatcher](mesh.ep_group)


@contextlib.contextmanager
def parallel(run: Run, **options: object) -> Iterator[tuple[nn.Module, fsdp.EPMesh]]:
    """Yield the model of a run, and its mesh."""
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    with dispatcher_of(run, mesh) as dispatcher:
        model = make_starved_model() if run.is_starved else make_model(run.kind)
        how = "none" if run.recomputes == "by transformers" else run.recomputes
        sharding = fsdp.Sharding(expert_dim=run.expert_dim, **options)
        fsdp.parallelize(model, mesh, dispatcher, sharding, activation_checkpointing=how)
        if run.divides:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(None)
                    module.set_force_sum_reduction_for_comms(False)
        if run.recomputes == "by transformers":
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        yield model, mesh


def step(run: Run, model: nn.Module, mesh: fsdp.EPMesh, index: int = 0) -> float:
    """Run forward and backward; return the mean loss of all ranks."""
    rank = dist.get_rank()
    batch = make_batch(rank, run.nums_sequences[rank], index)
    loss = fsdp.scale_loss(loss_sum(model, batch), num_targets(batch), mesh)
    (loss * dist.get_world_size() if run.divides else loss).backward()
    return float(fsdp.global_sum(loss, mesh))


def import_models(_: dist.ProcessGroup) -> None:
    """Import what jobs need, which takes long where ranks share cores."""
    make_model("qwen3")


def differences_of_accumulation(_: dist.ProcessGroup, run: Run) -> dict[str, float]:
    """Return differences of gradients of two batches, reduced once, from those of both in one process."""
    batches = [together(run.nums_sequences, index) for index in range(2)]
    num_all = sum(map(num_targets, batches))
    expected = make_model(run.kind)
    (sum(loss_sum(expected, batch) for batch in batches) / num_all).backward()
    rank = dist.get_rank()
    with parallel(run) as (model, _):
        for index in range(2):
            model.set_requires_gradient_sync(index == 1)
            (loss_sum(model, make_batch(rank, run.nums_sequences[rank], index)) / num_all).backward()
        return {
            name: difference(parameter.grad, expected.get_parameter(name).grad)
            for name, parameter in model.named_parameters()
        }


def difference(ours: torch.Tensor | None, theirs: torch.Tensor) -> float:
    """Return the largest difference, in units of the largest value."""
    assert ours is not None
    whole = (ours.full_tensor() if isinstance(ours, DTensor) else ours).to(theirs.device)
    assert whole.shape == theirs.shape
    if not theirs.any():
        return float(whole.any())
    return float((whole - theirs).abs().max() / theirs.abs().max())


def differences_of_gradients(_: dist.ProcessGroup, run: Run) -> dict[str, float]:
    """Return differences of loss, gradients (by parameter) and gradient norms from a single process."""
    reference = alone(run.kind, run.nums_sequences, run.is_starved)
    with parallel(run) as (model, mesh):
        loss = step(run, model, mesh)
        parameters = dict(model.named_parameters())
        assert parameters.keys() == reference.grads.keys()
        differences = {name: difference(parameters[name].grad, grad) for name, grad in reference.grads.items()}
        for p, norm in reference.norms.items():
            differences[f"norm {p}"] = abs(float(fsdp.grad_norm(parameters.values(), p)) / norm - 1)
    return {"loss": abs(loss / reference.loss - 1), **differences}


def differences_of_a_block(_: dist.ProcessGroup, run: Run, nums_tokens: tuple[int, ...]) -> dict[str, float]:
    """As ``differences_of_gradients``, for one block with a router and experts, and its inputs."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(1, sum(nums_tokens), 16, generator=generator, requires_grad=True)
    expected = make_model(run.kind).model.layers[0].mlp
    expected.experts.config._experts_implementation = "eager"
    loss = expected(whole).square().sum()
    for tensor in (whole, *expected.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    if loss.requires_grad:  # transformers' experts leave the graph if there are no tokens at all
        loss.backward()

    mesh = mesh_of(run.ep_size, run.dp_replicate)
    before = sum(nums_tokens[: dist.get_rank()])
    mine = slice(before, before + nums_tokens[dist.get_rank()])
    x = whole.detach()[:, mine].to(mesh.device_type, copy=True).requires_grad_()
    with dispatcher_of(run, mesh) as dispatcher:
        block = make_model(run.kind).model.layers[0].mlp
        fsdp.parallelize(block, mesh, dispatcher)
        block(x).square().sum().backward()
        differences = {
            name: difference(parameter.grad, expected.get_parameter(name).grad)
            for name, parameter in block.named_parameters()
        }
    return {"x": difference(x.grad, whole.grad[:, mine]) if x.numel() else 0.0, **differences}


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


def error_of_undistributed_experts(_: dist.ProcessGroup) -> str:
    """Return the error of the implementation for experts that are not distributed."""
    model = make_model("mixtral")
    group, settings = mesh_of(2, 1).ep_group, Settings(timeout_s=LIMIT_S)
    with fsdp.registered_as_experts_implementation(group, SEQUENCE, name="other", settings=settings):
        model.set_experts_implementation("other")
        with pytest.raises(ValueError, match="distribute its parameters") as error:
            loss_sum(model, make_batch(0, 1))
    return str(error.value)


def differences_of_training(_: dist.ProcessGroup, run: Run, num_steps: int) -> dict[str, float]:
    """Return absolute differences of parameters after clipped AdamW steps from a single process."""
    expected = make_model(run.kind)
    alone_optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with parallel(run) as (model, mesh):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for index in range(num_steps):
            step_alone(expected, together(run.nums_sequences, index))
            theirs = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            step(run, model, mesh, index)
            ours = fsdp.clip_grad_norm_(model.parameters(), 0.5)
            assert theirs > 0.5
            assert abs(ours / theirs - 1) < 1e-4
            for each in (alone_optimizer, optimizer):
                each.step()
                each.zero_grad()
        return {
            name: float((parameter.detach().full_tensor() - expected.get_parameter(name)).detach().abs().max())
            for name, parameter in model.named_parameters()
        }


def error_of(_: dist.ProcessGroup, run: Run, changes: dict[str, int], seed_by_rank: bool = False) -> str:
    """Return the error of ``parallelize`` for changed sizes, or for weights that differ between ranks."""
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    model = make_model(run.kind, **changes)
    if seed_by_rank:
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight.add_(dist.get_rank())
    try:
        dispatcher, sharding = fsdp.TorchDispatcher(mesh.ep_group), fsdp.Sharding(expert_dim=run.expert_dim)
        fsdp.parallelize(model, mesh, dispatcher, sharding, activation_checkpointing=run.recomputes)
    except ValueError as error:
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return str(error)
    return "none"


def errors_of_misuse(_: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of ``parallelize`` for invalid dispatchers and models."""
    mesh, rank = mesh_of(2, 1), dist.get_rank()
    dispatcher, others = fsdp.TorchDispatcher(mesh.ep_group), fsdp.TorchDispatcher(mesh.expert["efsdp"].get_group())
    with fsdp.parameters_on_meta():
        on_meta = make_model("qwen3")
    once = make_model("qwen3")
    fsdp.parallelize(once, mesh, dispatcher)
    otherwise = make_model("qwen3")
    otherwise.model.layers[1].mlp.experts._apply_gate = lambda hidden: hidden.chunk(2, dim=-1)[0]
    otherwise.model.layers[1].mlp.experts.forward = make_model("qwen3").model.layers[1].mlp.experts.forward
    mistakes = {
        "another formula on rank 1": (otherwise if rank == 1 else make_model("qwen3"), dispatcher),
        "another group": (make_model("qwen3"), others),
        "another group on rank 1": (make_model("qwen3"), others if rank == 1 else dispatcher),
        "values on rank 0": (make_model("qwen3") if rank == 0 else on_meta, dispatcher),
        "twice": (once, dispatcher),
        "no forward": (nn.ModuleDict({"layer": make_model("qwen3").model.layers[0]}), dispatcher),
    }
    errors = {}
    for name, (model, given) in mistakes.items():
        before = [(id(parameter), type(parameter)) for parameter in model.parameters()]
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is looked at by the test
            fsdp.parallelize(model, mesh, given)
        errors[name] = str(error.value)
        assert before == [(id(parameter), type(parameter)) for parameter in model.parameters()]
    return errors


def bytes_while_sharding(_: dist.ProcessGroup, run: Run) -> dict[str, int]:
    """Return bytes of a layer's experts on this rank, the maximum distributed but not yet sharded, and all at the end.

    FSDP moves a module to the device and shards it in ``fully_shard``, which is looked at before it begins.
    """
    peak = 0

    def watching(module: nn.Module, **options: object) -> nn.Module:
        nonlocal peak
        distributed = [p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh == mesh.expert["ep"]]
        peak = max(peak, sum(parameter.to_local().nbytes for parameter in distributed))
        return fully_shard(module, **options)

    mesh, model = mesh_of(run.ep_size, run.dp_replicate), make_model(run.kind)
    experts = model.model.layers[0].mlp.experts
    layer = sum(parameter.nbytes for parameter in experts.parameters()) // run.ep_size
    with mock.patch("fusco.fsdp.wrapping.fully_shard", watching):
        fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    left = sum(p.to_local().untyped_storage().nbytes() for p in experts.parameters())
    return {"layer": layer, "peak": peak, "left": left}


def error_of_mesh(_: dist.ProcessGroup, ep_size: int, dp_replicate: int) -> str:
    """Return the error of ``build_mesh``."""
    try:
        fsdp.build_mesh(ep_size, dp_replicate)
    except ValueError as error:
        return str(error)
    return "none"


def error_of_too_many_tokens(_: dist.ProcessGroup) -> str:
    """Return the error of a dispatcher made for one token, for a larger batch."""
    mesh = mesh_of(2, 1)
    model = make_model("qwen3")
    batch = make_batch(0, 1)
    error_text = "none"
    with fsdp.FuscoDispatcher(mesh.ep_group, 1, settings=Settings(timeout_s=LIMIT_S)) as dispatcher:
        fsdp.parallelize(model, mesh, dispatcher)
        try:
            loss_sum(model, batch)
        except ValueError as error:
            error_text = str(error)
    with pytest.raises(ClosedError, match="the dispatcher is closed"):
        loss_sum(model, batch)
    return error_text


class WatchingDispatcher(fsdp.TorchDispatcher):
    """Records dtypes."""

    def dispatch(self, x, topk_idx, topk_weights, num_experts):
        self.seen = {"x": str(x.dtype), "weights": str(topk_weights.dtype)}
        return super().dispatch(x, topk_idx, topk_weights, num_experts)

    def combine(self, y, arrival):
        self.seen["y"] = str(y.dtype)
        return super().combine(y, arrival)


class Float32Router(nn.Module):
    """A router with float32 weights, as that of DeepSeek-V3."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden):
        logits, weights, experts = self.router(hidden)
        return logits, weights.float(), experts


def dtypes_under_mixed_precision(_: dist.ProcessGroup) -> dict[str, str]:
    """Return the dtypes exchanged if parameters are stored in float32 and used in bfloat16."""
    mesh = mesh_of(2, 1)
    dispatcher = WatchingDispatcher(mesh.ep_group)
    model = make_model("qwen3")
    for layer in model.model.layers:
        layer.mlp.gate = Float32Router(layer.mlp.gate)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(mixed_precision=policy))
    loss_sum(model, make_batch(0, 1)).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(bool(torch.isfinite(parameter.grad.full_tensor()).all()) for parameter in model.parameters())
    return dispatcher.seen


class FrozenRouter(nn.Module):
    """Routes tokens by position, so that rounding cannot change the experts; weights are learned."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden):
        logits, weights, experts = self.router(hidden)
        place = torch.arange(len(experts), device=experts.device)[:, None]
        experts = (place * 5 + torch.arange(experts.shape[1], device=experts.device)) % logits.shape[1]
        return logits, logits.float().softmax(-1).gather(1, experts).to(weights.dtype), experts


def make_frozen_model(kind: str) -> nn.Module:
    model = make_model(kind)
    for layer in model.model.layers:
        layer.mlp.gate = FrozenRouter(layer.mlp.gate)
    return model


def differences_under_mixed_precision(_: dist.ProcessGroup, run: Run) -> dict[str, float]:
    """As ``differences_of_gradients``, of gradients in bfloat16 from those of float32."""
    rank, expected = dist.get_rank(), make_frozen_model(run.kind)
    batches = [make_batch(each, num) for each, num in enumerate(run.nums_sequences)]
    num_all = sum(map(num_targets, batches))
    loss = sum(loss_sum(expected, batch) for batch in batches) / num_all  # tokens have the places that they have here
    loss.backward()
    alone_loss = float(loss.detach())
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with dispatcher_of(run, mesh) as dispatcher:
        model = make_frozen_model(run.kind)
        fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(mixed_precision=policy))
        ours = fsdp.scale_loss(loss_sum(model, batches[rank]), num_targets(batches[rank]), mesh)
        ours.backward()
        differences = {
            name: difference(parameter.grad, expected.get_parameter(name).grad)
            for name, parameter in model.named_parameters()
        }
        return {"loss": abs(float(fsdp.global_sum(ours, mesh)) / alone_loss - 1), **differences}


def prefetched(_: dist.ProcessGroup) -> tuple[dict[str, list[str]], ...]:
    """Return the modules that FSDP prefetches, by name of the prefetching module; forward and backward."""
    with parallel(Run()) as (model, _):
        name_of = {
            id(module._get_fsdp_state()): name.removeprefix("model").removeprefix(".")
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
        }
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        return tuple(
            {
                name_of[id(state)]: [name_of[id(other)] for other in getattr(state, f"_states_to_{way}_prefetch")]
                for state in states
                if getattr(state, f"_states_to_{way}_prefetch")
            }
            for way in ("forward", "backward")
        )

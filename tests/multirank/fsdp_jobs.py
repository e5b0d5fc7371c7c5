"""Functions on ranks: a model on expert parallelism and FSDP2, against the same model in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import alone, loss_sum, make_batch, make_model, num_targets, step_alone, together
from fsdp_runs import Run, difference, dispatcher_of, mesh_of, parallel, step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fusco import fsdp
from fusco.fsdp.dispatcher import BalancedArrival


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


def differences_with_balance(group: dist.ProcessGroup, run: Run) -> tuple[dict[str, float], int]:
    """As ``differences_of_gradients``, and in how many layers plans have copied experts."""
    num_layers, dispatch = [0], fsdp.FuscoDispatcher.dispatch_balanced

    def counting(*arguments: Any) -> BalancedArrival:
        arrival = dispatch(*arguments)
        num_layers[0] += bool(arrival.copies.weights)
        return arrival

    with mock.patch.object(fsdp.FuscoDispatcher, "dispatch_balanced", counting):
        return differences_of_gradients(group, run), num_layers[0]


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


def differences_of_training(_: dist.ProcessGroup, run: Run, num_steps: int, **options: object) -> dict[str, float]:
    """Return absolute differences of parameters after clipped AdamW steps from a single process."""
    expected = make_model(run.kind)
    alone_optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with parallel(run, **options) as (model, mesh):
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
            name: float((_on_cpu(parameter, mesh) - expected.get_parameter(name)).detach().abs().max())
            for name, parameter in model.named_parameters()
        }


def differences_of_offloading(group: dist.ProcessGroup, run: Run, num_steps: int) -> dict[str, float]:
    """As ``differences_of_training``; parameters and the optimizer's moments are in main memory after a step."""
    policy, step_of_adam = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()), torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW) -> None:
        step_of_adam(optimizer)
        tensors = [*optimizer.state, *(moment for state in optimizer.state.values() for moment in state.values())]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}

    with mock.patch.object(torch.optim.AdamW, "step", watched):
        return differences_of_training(group, run, num_steps, offload=policy)


def offloaded_from_meta(_: dist.ProcessGroup, path: Path) -> set[str]:
    """Return the devices of parameters that are filled after they were on meta; computing is on the ranks' device."""
    mesh = mesh_of(2, 1)
    with fsdp.parameters_on_meta():
        model = make_model("qwen3")
    sharding = fsdp.Sharding(offload=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group), sharding)
    fsdp.materialize(model, mesh.device_type)
    fsdp.load_hugging_face(path, model)
    fsdp.save_checkpoint(path / "checkpoint", model)
    fsdp.load_checkpoint(path / "checkpoint", model)
    fsdp.save_hugging_face(path / "again", model)
    devices = {parameter.device.type for parameter in model.parameters()}  # without the whole copies of a forward pass
    logits = model(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=mesh.device_type)).logits
    assert logits.device.type == mesh.device_type == next(model.buffers()).device.type
    return devices


def _on_cpu(parameter: torch.Tensor, mesh: fsdp.EPMesh) -> torch.Tensor:
    return parameter.detach().to(mesh.device_type).full_tensor().cpu()


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


def differences_with_an_output_dtype(_: dist.ProcessGroup, run: Run) -> dict[str, float]:
    """Of gradients of narrow parameters whose model returns float32, from those of one that does not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    for each in (policy, replace(policy, output_dtype=torch.float32)):
        with parallel(run, mixed_precision=each) as (model, mesh):
            with torch.no_grad():
                logits = model(input_ids=make_batch(0, 1).ids).logits
            assert logits.dtype == (each.output_dtype or torch.bfloat16)
            step(run, model, mesh)
            seen.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})
    return {name: difference(seen[1][name], grad) for name, grad in seen[0].items()}


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

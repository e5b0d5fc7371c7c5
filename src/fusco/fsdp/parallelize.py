"""``parallelize``: expert parallelism and fully sharded parameters for a model, in one call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusco.core.balance import Balance
from fusco.fsdp.activation_checkpointing import Checkpointing, check_checkpointing, checkpoint_blocks
from fusco.fsdp.adapters import prepare_adapters
from fusco.fsdp.checks import check_equal_weights, check_parameters, on_all_ranks
from fusco.fsdp.dispatcher import CopyingDispatcher, Dispatcher
from fusco.fsdp.expert_adapters import ExpertAdapter
from fusco.fsdp.experts import Experts, ScaledInputs, find_experts
from fusco.fsdp.formula import check_formulas
from fusco.fsdp.layer import ExpertParallelLayer
from fusco.fsdp.mesh import EPMesh
from fusco.fsdp.wrapping import Sharding, find_units, set_prefetch, shard_dense, shard_experts

# With PyTorch 2.13 their steps end in errors of ``DTensor`` that name no optimizer.
_UNSHARDED = (torch.optim.Adafactor, torch.optim.Rprop)
_FUSED_UNSHARDED = (torch.optim.SGD, torch.optim.Adagrad)


def parallelize(
    model: nn.Module,
    mesh: EPMesh,
    dispatcher: Dispatcher,
    sharding: Sharding | None = None,
    *,
    activation_checkpointing: Checkpointing = "none",
    balance: Balance | None = None,
) -> list[Experts]:
    """Distribute a model's experts and shard all parameters, in place; a collective of all ranks.

    Experts become ``DTensor`` parameters, distributed among the "ep" ranks on dimension 0 and sharded by FSDP2 among
    the "efsdp" ranks; everything else is sharded by FSDP2 among all ranks. Blocks (entries of the ``ModuleList`` that
    holds the experts) and the experts within are wrapped separately.

    Gradients are *added* over all ranks, never averaged: divide the loss by the number of tokens of all ranks
    (``scale_loss``), and both expert and dense gradients are correct.

    Args:
        model: with experts as in ``find_experts``, and with the same weights on all ranks, or on the meta device.
            Weights in main memory are cut there and move to the mesh's device module by module, so that in addition to
            its shards the device holds one module's part at a time.
        mesh: from ``build_mesh``.
        dispatcher: moves tokens to experts and back, for all layers, among the ranks of ``mesh.ep_group``.
        sharding: ``None`` means the defaults.
        activation_checkpointing: what blocks save for the backward pass. ``"none"``: everything. ``"full"``: their
            inputs only; all of a block is recomputed, dispatch and combine included. ``"selective"``: their inputs and
            the outputs of dispatch and combine, so that no row is moved twice.
        balance: plans copies of busy experts for each batch, so that ranks of an "ep" group compute equally many rows;
            gradients of copies return to their homes before FSDP reduces them. The dispatcher must be a
            ``FuscoDispatcher``.

    Returns:
        The modules of experts found.

    Raises:
        ValueError: on all ranks, before anything is changed: for an unknown ``activation_checkpointing``, a dispatcher
            of another group, a model without experts or already parallelized, experts that do not compute what
            ``Experts.run`` computes or that another adapter than LoRA of peft wraps, a number of experts that
            ``ep_size`` does not divide, a parameter or a container that cannot be sharded, trainable parameters of
            several dtypes in a block, a parameter that blocks share, or weights that differ between ranks.
    """
    settled = sharding or Sharding()

    def check() -> list[Experts]:
        check_checkpointing(activation_checkpointing)
        _check_group(dispatcher, mesh)
        if balance is not None and not isinstance(dispatcher, CopyingDispatcher):
            raise ValueError(
                f"balance needs a FuscoDispatcher, which can copy experts, not {type(dispatcher).__name__}"
            )
        return _check_model(model, mesh, settled)

    found = on_all_ranks(check)
    check_equal_weights(model, mesh.device_type)
    for number, undistributed in enumerate(found):  # a layer at a time, so that no device has all of them unsharded
        found[number] = experts = _distribute(undistributed, mesh)
        shard_experts(experts, mesh, settled)
        experts.module.forward = ExpertParallelLayer(experts, dispatcher, balance)
        for adapter in experts.adapters:
            adapter.layer.forward = adapter
        if experts.scaling_block:
            experts.scaling_block.forward = ScaledInputs(experts.scaling_block)
    units, name = find_units(model, found), type(model).__name__
    shard_dense(model, units, mesh, settled)
    prepare_adapters(model, name)
    refuse_data_parallel(model, name)
    refuse_unsharded_optimizers(model)
    checkpoint_blocks((unit.block for unit in units), activation_checkpointing)
    if settled.has_prefetch:
        set_prefetch(model, units)
    return found


def _check_group(dispatcher: Dispatcher, mesh: EPMesh) -> None:
    """Raise if the groups differ: another group of the same size would train, but on other ranks' tokens."""
    expected, given = (dist.get_process_group_ranks(group) for group in (mesh.ep_group, dispatcher.group))
    if expected != given:
        raise ValueError(f"the dispatcher is of ranks {given}, but experts are distributed among ranks {expected}")


def _check_model(model: nn.Module, mesh: EPMesh, sharding: Sharding) -> list[Experts]:
    distributed = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if distributed:
        raise ValueError(f"parameter {distributed[0]} is already distributed: parallelize takes a plain model, once")
    found = find_experts(model)
    for experts in found:
        _check_shape(experts, mesh, sharding.expert_dim)
    check_formulas(found)
    blocks = [unit.block for unit in find_units(model, found)]
    check_parameters(model, (*blocks, *(experts.module for experts in found)))
    for module in (model, *blocks):
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"FSDP cannot shard a {type(module).__name__}, which has no forward: parallelize its parent"
            )
    return found


def _check_shape(experts: Experts, mesh: EPMesh, expert_dim: int) -> None:
    for key, parameter in experts.module.named_parameters():
        where = f"{experts.name}.{key} of shape {tuple(parameter.shape)}"
        if experts.num_experts % mesh.ep_size:
            raise ValueError(f"{where}: ep_size={mesh.ep_size} does not divide its {experts.num_experts} experts")
        # FSDP2 pads dimension 0 only.
        if expert_dim == 1 and parameter.shape[1] % mesh.efsdp_size:
            raise ValueError(
                f"{where}: the {mesh.efsdp_size} ranks that share an expert do not divide dimension 1; choose another "
                f"ep_size, or Sharding(expert_dim=0)"
            )


def _distribute(experts: Experts, mesh: EPMesh) -> Experts:
    """Keep only this rank's experts, as DTensors, from which FSDP, checkpoints and norms know the placement."""
    for key, parameter in list(experts.module.named_parameters()):
        # Every rank slices its copy before the part moves to the device; nothing is sent.
        ep_mesh = mesh.expert["ep"]
        mine = parameter.detach()[: experts.num_experts].chunk(mesh.ep_size)[ep_mesh.get_local_rank()]
        local = DTensor.from_local(mine, ep_mesh, [Shard(0)], run_check=False)
        experts.module.register_parameter(key, nn.Parameter(local, requires_grad=parameter.requires_grad))
    num_local = experts.num_experts // mesh.ep_size
    first = mesh.expert["ep"].get_local_rank() * num_local
    adapters = [ExpertAdapter(each.layer, experts.module, first, num_local) for each in experts.adapters]
    return replace(experts, adapters=adapters)


@dataclass(frozen=True)
class _NoNames:
    """Names of parameters that ``DistributedDataParallel`` asks a model for, before all else: there are none to give.

    It would fail when it sends parameters, with an error about operands of an operation of ``DTensor``.
    """

    model: str

    def __iter__(self) -> Iterator[str]:
        raise TypeError(
            f"DistributedDataParallel cannot wrap this {self.model}, whose gradients fusco.fsdp.parallelize adds up "
            f"already. For transformers' Trainer, load the model within fusco.fsdp.registered_with_transformers. With "
            f"accelerate, call accelerator.prepare for all but the model. In Lightning, parallelize in "
            f"ModelParallelStrategy, and clip gradients with fusco.fsdp.clip_grad_norm_"
        )


def refuse_data_parallel(model: nn.Module, name: str) -> None:
    """Make ``DistributedDataParallel`` raise ``TypeError`` for a model, which has the name of its class before."""
    model._ddp_params_and_buffers_to_ignore = _NoNames(name)  # type: ignore[assignment]  # noqa: SLF001  DDP's only door


# Module state: PyTorch's hook is called for the steps of all optimizers. It stays when a model ends, as that may be
# during a step, in which PyTorch goes through all hooks.
_sharded_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_unsharded_optimizers(model: nn.Module) -> None:
    """Make the step of an optimizer that fails on the model's sharded parameters raise ``ValueError`` at once."""
    _check_steps()
    _sharded_models.add(model)


@cache
def _check_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not (obstacle := _obstacle(optimizer)):
        return
    of_models = (parameter for model in _sharded_models for parameter in model.parameters())
    sharded = {id(parameter) for parameter in of_models if isinstance(parameter, DTensor)}
    if any(id(parameter) in sharded for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"{obstacle} cannot step on parameters that FSDP2 shards (DTensor): use torch.optim.AdamW, or another "
            f"optimizer of the table in docs/training/runs.md"
        )


def _obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name if it cannot step on sharded parameters, else nothing."""
    name = f"torch.optim.{type(optimizer).__name__}"
    if isinstance(optimizer, _UNSHARDED):
        return name
    if isinstance(optimizer, _FUSED_UNSHARDED) and any(group.get("fused") for group in optimizer.param_groups):
        return f"{name} with fused=True"
    return ""

"""Wrap a model's blocks and experts with FSDP2: sharding options, gradient reduction, prefetch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fusco.fsdp.experts import Experts
from fusco.fsdp.mesh import EPMesh

_OFFLOADED = "_fusco_is_offloaded"
_MARK = "_fusco_is_whole_copy"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of FSDP2; all but ``expert_dim`` and ``has_prefetch`` are passed to ``fully_shard``.

    Attributes:
        expert_dim: the dimension along which FSDP shards an expert's parameters, after dimension 0 (the experts) has
            been distributed among the "ep" ranks. 1 gives every shard a part of each expert, for any number of experts,
            and must divide evenly; 0 gives every shard whole experts, and needs no copy around communication.
        mixed_precision: as for ``fully_shard``. Router weights are not cast on their way into the experts. Only the
            model's outputs are cast to ``output_dtype``, not those of blocks and experts.
        reshard_after_forward: as for ``fully_shard``, for blocks and experts.
        offload: ``CPUOffloadPolicy()`` keeps parameters, gradients and so the optimizer in main memory; a GPU has a
            block's parameters while it is used.
        has_prefetch: whether each block prefetches the next block and its experts, forward and backward.
    """

    expert_dim: int = 1
    mixed_precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool = True
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    has_prefetch: bool = True

    def __post_init__(self) -> None:
        if self.expert_dim not in (0, 1):
            raise ValueError(f"expert_dim must be 0 or 1, got {self.expert_dim}")


@dataclass(frozen=True, eq=False)
class Unit:
    """A block, and the modules of experts in it, each wrapped separately."""

    block: nn.Module
    experts: tuple[nn.Module, ...] = ()

    @property
    def wrapped(self) -> list[FSDPModule]:
        """The block and its experts, in the order of use, forward and (the block first) backward."""
        return [cast("FSDPModule", module) for module in (self.block, *self.experts)]


def shard_experts(experts: Experts, mesh: EPMesh, sharding: Sharding) -> None:
    """Shard a module of experts, already distributed among the "ep" ranks, with FSDP."""
    fully_shard(
        experts.module,
        mesh=mesh.expert_fsdp,
        reshard_after_forward=sharding.reshard_after_forward,
        shard_placement_fn=lambda _: Shard(sharding.expert_dim),
        # The layer casts its inputs itself, so that router weights keep their precision.
        mp_policy=replace(sharding.mixed_precision, cast_forward_inputs=False, output_dtype=None),
        offload_policy=sharding.offload,
    )


def shard_dense(model: nn.Module, units: Sequence[Unit], mesh: EPMesh, sharding: Sharding) -> None:
    """Shard blocks with FSDP, then the rest of the model, and make FSDP add all gradients.

    Gradients are added, not averaged. FSDP divides by the size of the group that it reduces over. For experts that size
    is smaller, by ``ep_size``, than the number of batches that reached them. A divide factor other than that size needs
    PREMUL_SUM, which gloo lacks, or is applied twice by PyTorch 2.13 where the group has one rank.
    """
    within = replace(sharding.mixed_precision, output_dtype=None)
    for block in (*(unit.block for unit in units), model):
        fully_shard(
            block,
            mesh=mesh.dense_fsdp,
            # The root's parameters are needed last in the forward pass and first in the backward pass.
            reshard_after_forward=sharding.reshard_after_forward and block is not model,
            mp_policy=sharding.mixed_precision if block is model else within,
            offload_policy=sharding.offload,
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # PyTorch 2.13 and newer
                # Ranks whose batches use different parameters would otherwise reduce buffers of different sizes.
                module.set_reduce_scatter_unused_params(True, recurse=False)
    reshard_after_evaluation(model)
    setattr(model, _OFFLOADED, isinstance(sharding.offload, CPUOffloadPolicy))


def is_offloaded(model: nn.Module) -> bool:
    """Return whether a wrapped model's parameters are in main memory."""
    return bool(getattr(model, _OFFLOADED, False))


def find_units(model: nn.Module, found: Sequence[Experts]) -> list[Unit]:
    """Return a model's blocks with their experts: the entries of each innermost ``ModuleList`` around experts."""
    lists: dict[str, nn.ModuleList] = {}
    for experts in found:
        parts = experts.name.split(".")
        for length in range(len(parts) - 2, 0, -1):
            parent = model.get_submodule(".".join(parts[:length]))
            if isinstance(parent, nn.ModuleList):
                lists[".".join(parts[:length])] = parent
                break
    return [
        Unit(block, tuple(experts.module for experts in found if experts.name.startswith(f"{prefix}.{key}.")))
        for prefix, blocks in lists.items()
        for key, block in blocks.named_children()
    ]


def set_prefetch(model: nn.Module, units: Sequence[Unit]) -> None:
    """Set FSDP's prefetch order: FSDP by default prefetches one wrapped module, and experts are one by themselves.

    Forward, the model prefetches the first block and its experts, and each block the next; backward, in reverse.
    """
    if not units:
        return
    cast("FSDPModule", model).set_modules_to_forward_prefetch(units[0].wrapped)
    cast("FSDPModule", model).set_modules_to_backward_prefetch(units[-1].wrapped)
    for unit, following in pairwise(units):
        cast("FSDPModule", unit.block).set_modules_to_forward_prefetch(following.wrapped)
        cast("FSDPModule", following.block).set_modules_to_backward_prefetch(unit.wrapped)


def reshard_after_evaluation(model: nn.Module) -> None:
    """Make a wrapped model reshard all its parameters after each forward pass without gradients.

    FSDP2 reshards some parameters in the backward pass only: the root's, and all of them with
    ``reshard_after_forward=False``. Without a backward pass these would stay whole copies. An optimizer made then would
    train these copies, which the next forward pass overwrites, and norms would miss the gradients, which belong to the
    shards. After a forward pass with gradients, whole copies are left in place and marked.

    Whole copies created in inference mode cannot be trained, and FSDP2 keeps those that it creates first. So before a
    first forward pass in inference mode all parameters are gathered once outside of it, a module at a time.
    """
    hooks = _Hooks()
    model.register_forward_pre_hook(hooks.before, prepend=True)
    model.register_forward_hook(hooks.after)


def is_whole_copy(parameter: torch.Tensor) -> bool:
    """Return whether this is the whole copy of a sharded parameter, as between forward and backward pass."""
    return getattr(parameter, _MARK, False)


class _Hooks:
    """The forward hooks of one model."""

    def __init__(self) -> None:
        self._has_gathered = self._has_marked = False

    @torch.compiler.disable(reason="FSDP2's hooks are not compiled either")  # type: ignore[untyped-decorator,no-untyped-call]
    def before(self, model: nn.Module, args: Any) -> None:  # noqa: ARG002  the signature of a hook
        if torch.is_inference_mode_enabled() and not self._has_gathered:
            with torch.inference_mode(mode=False), torch.no_grad():
                for module in _wrapped(model):
                    module.unshard()
                    module.reshard()
        self._has_gathered = True

    @torch.compiler.disable(reason="FSDP2's hooks are not compiled either")  # type: ignore[untyped-decorator,no-untyped-call]
    def after(self, model: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002  the signature of a hook
        if not torch.is_grad_enabled():
            for module in _wrapped(model):
                module.reshard()
        elif not self._has_marked:  # FSDP2 creates each copy once and refills it
            for parameter in model.parameters():
                if not isinstance(parameter, DTensor):
                    setattr(parameter, _MARK, True)
            self._has_marked = True


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

"""Which modules FSDP2 wraps, and what it does with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from fusco.fsdp.experts import Experts
from fusco.fsdp.mesh import EPMesh
from fusco.fsdp.prefetch import Unit
from fusco.fsdp.resharding import reshard_after_evaluation
from fusco.fsdp.sharding import Sharding


def shard_experts(experts: Experts, mesh: EPMesh, sharding: Sharding) -> None:
    """Hand a module of experts, distributed already, to FSDP."""
    fully_shard(
        experts.module,
        mesh=mesh.expert_fsdp,
        reshard_after_forward=sharding.reshard_after_forward,
        shard_placement_fn=lambda _: Shard(sharding.expert_dim),
        # The layer casts its inputs by itself, which leaves the weights of the router as exact as they are.
        mp_policy=replace(sharding.mixed_precision, cast_forward_inputs=False),
    )


def shard_dense(model: nn.Module, units: Sequence[Unit], mesh: EPMesh, sharding: Sharding) -> None:
    """Hand blocks to FSDP, then the rest, and have the gradients of everything added.

    They are added, not averaged. FSDP's default divides by the size of the group that it reduces over, which for
    experts is smaller, by ``ep_size``, than the number of batches that reached them. A divide factor other than that
    size needs PREMUL_SUM, which gloo lacks, or is applied twice by PyTorch 2.13 where the group has one rank.
    """
    for block in (*(unit.block for unit in units), model):
        fully_shard(
            block,
            mesh=mesh.dense_fsdp,
            # The root's parameters are needed last in the forward pass and first in the backward pass.
            reshard_after_forward=sharding.reshard_after_forward and block is not model,
            mp_policy=sharding.mixed_precision,
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # PyTorch 2.13 and newer
                # Ranks whose batches use different parameters would otherwise reduce buffers of different sizes.
                module.set_reduce_scatter_unused_params(True, recurse=False)
    reshard_after_evaluation(model)


def find_units(model: nn.Module, found: Sequence[Experts]) -> list[Unit]:
    """The blocks of a model, with their experts: the entries of each innermost ``ModuleList`` around experts."""
    lists: dict[str, nn.ModuleList] = {}
    for experts in found:
        parts = experts.name.split(".")
        for length in range(len(parts) - 2, 0, -1):
            around = model.get_submodule(".".join(parts[:length]))
            if isinstance(around, nn.ModuleList):
                lists[".".join(parts[:length])] = around
                break
    return [
        Unit(block, tuple(experts.module for experts in found if experts.name.startswith(f"{prefix}.{key}.")))
        for prefix, blocks in lists.items()
        for key, block in blocks.named_children()
    ]

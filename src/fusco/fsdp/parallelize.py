"""One call from a model on every rank to expert parallelism with fully sharded parameters."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fusco.fsdp.checkpointing import Checkpointing, check_checkpointing, checkpoint_blocks
from fusco.fsdp.dispatcher import Dispatcher
from fusco.fsdp.experts import Experts, find_experts
from fusco.fsdp.layer import ExpertParallelLayer
from fusco.fsdp.mesh import EPMesh
from fusco.fsdp.prefetch import set_prefetch
from fusco.fsdp.sharding import Sharding
from fusco.fsdp.weights import check_equal_weights
from fusco.fsdp.wrapping import wrap


def parallelize(
    model: nn.Module,
    mesh: EPMesh,
    dispatcher: Dispatcher,
    sharding: Sharding | None = None,
    *,
    activation_checkpointing: Checkpointing = "none",
) -> list[Experts]:
    """Distribute a model's experts and shard everything, in place; a collective of all ranks.

    Experts become ``DTensor`` parameters, distributed among the "ep" ranks on dimension 0 and sharded by FSDP2 among
    the "efsdp" ranks; everything else is sharded by FSDP2 among all ranks. Blocks (entries of the ``ModuleList`` that
    holds the experts) and the experts within are wrapped each on its own.

    Gradients are *added* over all ranks, never averaged: divide the loss by the number of tokens of all ranks
    (``scale_loss``), and expert and dense gradients are right alike.

    Args:
        model: any with experts as in ``find_experts``, with the same weights on all ranks, or on the meta device.
        mesh: from ``build_mesh``.
        dispatcher: moves tokens to experts and back, for all layers.
        sharding: ``None`` means the defaults.
        activation_checkpointing: what blocks do without until the backward pass. ``"none"``: nothing. ``"full"``:
            everything but their inputs; all of a block is computed again, tokens are dispatched and combined again.
            ``"selective"``: everything but their inputs and what dispatch and combine gave, so that nothing is moved
            twice.

    Returns:
        The modules of experts that were found.

    Raises:
        ValueError: on all ranks, before anything is changed: for an unknown ``activation_checkpointing``, a model
            without experts, a number of experts that ``ep_size`` does not divide, a parameter that cannot be sharded,
            or weights that differ between ranks.

    """
    sharding = sharding or Sharding()
    check_checkpointing(activation_checkpointing)
    found = find_experts(model)
    for experts in found:
        _check_shape(experts, mesh, sharding.expert_dim)
    check_equal_weights(model, mesh.device_type)
    for experts in found:
        _distribute(experts, mesh)
        experts.module.forward = ExpertParallelLayer(experts, dispatcher)
    units = wrap(model, found, mesh, sharding)
    checkpoint_blocks((unit.block for unit in units), activation_checkpointing)
    if sharding.has_prefetch:
        set_prefetch(model, units)
    return found


def _check_shape(experts: Experts, mesh: EPMesh, expert_dim: int) -> None:
    for key, parameter in experts.module.named_parameters():
        where = f"{experts.name}.{key} of shape {tuple(parameter.shape)}"
        if len(parameter) % mesh.ep_size:
            raise ValueError(f"{where}: ep_size={mesh.ep_size} does not divide its {len(parameter)} experts")
        # FSDP2 pads dimension 0 only.
        if expert_dim == 1 and parameter.shape[1] % mesh.efsdp_size:
            raise ValueError(
                f"{where}: the {mesh.efsdp_size} ranks that share an expert do not divide dimension 1; choose another "
                f"ep_size, or Sharding(expert_dim=0)"
            )


def _distribute(experts: Experts, mesh: EPMesh) -> None:
    """Keep only this rank's experts, as DTensors: FSDP, checkpoints and norms see what is where."""
    for key, parameter in list(experts.module.named_parameters()):
        # Every rank cuts its own part out of its own copy; nothing is sent.
        local = distribute_tensor(parameter.detach(), mesh.expert["ep"], [Shard(0)], src_data_rank=None)
        experts.module.register_parameter(key, nn.Parameter(local, requires_grad=parameter.requires_grad))

"""A parallelized model on ranks: its mesh, its dispatcher, and a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, loss_sum, make_batch, make_model, make_starved_model, num_targets
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fusco import Settings, fsdp
from fusco.placement import Balance

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
        spare_places: for copies of busy experts on each rank; 0 means no balance.
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
    spare_places: int = 0

    @property
    def balance(self) -> Balance | None:
        """A plan that copies as many experts as it can."""
        return Balance(self.spare_places, tolerance=0.0) if self.spare_places else None


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
        fsdp.parallelize(model, mesh, dispatcher, sharding, activation_checkpointing=how, balance=run.balance)
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


def difference(ours: torch.Tensor | None, theirs: torch.Tensor) -> float:
    """Return the largest difference, in units of the largest value."""
    assert ours is not None
    found = whole_of(ours).to(theirs.device)
    assert found.shape == theirs.shape
    if not theirs.any():
        return float(found.any())
    return float((found - theirs).abs().max() / theirs.abs().max())


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values of all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

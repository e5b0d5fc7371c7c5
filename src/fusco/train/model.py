"""The model of a job: created on the meta device, sharded, then filled, each rank its local shards."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from fusco import fsdp
from fusco.fsdp.qwen3 import make_qwen3
from fusco.train.job import TrainingJob
from fusco.train.text import mix_seed

_STD = 0.02  # of initial weights, as in Qwen3


def make_model(job: TrainingJob, mesh: fsdp.EPMesh, dispatcher: fsdp.Dispatcher) -> nn.Module:
    """Return a parallelized Qwen3-MoE; its weights depend on seed, shape and device type only, not on the ranks."""
    with fsdp.parameters_on_meta():
        model = make_qwen3(job.shape, use_cache=False, attention_dropout=job.dropout)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.parallelize(
        model,
        mesh,
        dispatcher,
        fsdp.Sharding(mixed_precision=precision if job.dtype == "bfloat16" else MixedPrecisionPolicy()),
        activation_checkpointing=job.activation_checkpointing,
    )
    fsdp.materialize(model, mesh.device_type)
    _fill(model, job.seed)
    return model


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Draw each full parameter, one at a time, and keep this rank's shard; those of norms are one."""
    for index, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        whole = torch.ones(parameter.shape, dtype=torch.float32, device=local.device)
        if parameter.ndim > 1:
            generator = torch.Generator(local.device).manual_seed(mix_seed(seed, index))
            whole.normal_(0, _STD, generator=generator)
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local.copy_(sharded.to_local())

"""The model of a job, created on the meta device, sharded, then filled, each rank its shards; and its balance loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from fusco import fsdp
from fusco.train.job import ModelShape, TrainingJob
from fusco.train.text import mix_seed

_STD = 0.02  # of initial weights, as in Qwen3


def make_model(job: TrainingJob, mesh: fsdp.EPMesh, dispatcher: fsdp.Dispatcher) -> nn.Module:
    """Return a parallelized Qwen3-MoE; its weights depend on seed, shape and device type only, not on the ranks."""
    with fsdp.parameters_on_meta():
        model = _whole_model(job.shape)
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


def _whole_model(shape: ModelShape) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415  an extra

    make_config: Any = Qwen3MoeConfig  # its generated constructor lacks head_dim
    config = make_config(
        vocab_size=256,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_topk,
        moe_intermediate_size=shape.moe_intermediate,
        norm_topk_prob=True,
        use_cache=False,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
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


def balance_loss(router_logits: Sequence[torch.Tensor], num_topk: int) -> torch.Tensor:
    """Return the mean over layers of ``num_experts`` times the sum over experts of (row share) * (mean probability).

    It is 1 if tokens or probabilities are spread evenly, and ``num_experts / num_topk`` if all tokens choose the same
    experts with probability 1. The corresponding function in transformers treats all layers as one; their sum may be
    even although no layer is.

    Args:
        router_logits: (num_tokens, num_experts) for each layer.
        num_topk: experts per token (top-k).

    Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6.

    >>> balance_loss([torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0], [0, 0, 0, 9.0]])], 1).item()
    1.0
    >>> round(balance_loss([torch.tensor([[99.0, 0, 0, 0]] * 4)], 1).item(), 4)
    4.0
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(1)
        is_chosen = torch.zeros_like(probabilities).scatter_(1, logits.topk(num_topk, dim=1).indices, 1.0)
        losses.append(logits.shape[1] * (is_chosen.mean(0) / num_topk * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()

"""The model of a job: created on the meta device, sharded, then filled, each rank its local shards."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from fusco import fsdp
from fusco.bench.train.job import TrainingJob
from fusco.bench.train.text import mix_seed
from fusco.core.balance import Balance
from fusco.fsdp.qwen3 import Qwen3Shape, make_glm4, make_qwen3

_STD = 0.02  # of initial weights, as in Qwen3


def make_model(job: TrainingJob, mesh: fsdp.EPMesh, dispatcher: fsdp.Dispatcher) -> nn.Module:
    """Return a parallelized model; its weights depend on seed, shape and device type only, not on the ranks."""
    with fsdp.parameters_on_meta():
        model = _make_bare(job)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.parallelize(
        model,
        mesh,
        dispatcher,
        fsdp.Sharding(mixed_precision=precision if job.dtype == "bfloat16" else MixedPrecisionPolicy()),
        activation_checkpointing=job.activation_checkpointing,
        balance=Balance(job.spare_places) if job.spare_places else None,
    )
    fsdp.materialize(model, mesh.device_type)
    if job.model is None:
        _fill(model, job.seed)
    else:
        fsdp.load_hugging_face(job.model, model)
    return model


def shape_of(folder: Path) -> Qwen3Shape:
    """Return the sizes of the model of a folder, under the names of Qwen3's; ``ValueError`` if it has no experts."""
    config: Any = importlib.import_module("transformers").AutoConfig.from_pretrained(folder).get_text_config()

    def size(*names: str) -> int:
        found = [getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)]
        if not found:
            raise ValueError(f"{folder} is of {config.model_type}, which has none of {', '.join(names)}: is it a MoE?")
        return int(found[0])

    return Qwen3Shape(
        num_layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        num_heads=size("num_attention_heads"),
        num_key_value_heads=size("num_key_value_heads", "num_attention_heads"),
        head_dim=getattr(config, "head_dim", None) or size("hidden_size") // size("num_attention_heads"),
        num_experts=size("num_experts", "n_routed_experts", "num_local_experts"),
        num_topk=size("num_experts_per_tok", "top_k_experts"),
        moe_intermediate=size("moe_intermediate_size", "intermediate_size"),
        vocab=size("vocab_size"),
    )


def _make_bare(job: TrainingJob) -> nn.Module:
    """Return the model as transformers makes it."""
    if job.model is None:
        make = {"qwen3_moe": make_qwen3, "glm4_moe": make_glm4}[job.architecture]
        return make(job.shape, use_cache=False, attention_dropout=job.dropout)
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(job.model)
    if hasattr(config.get_text_config(), "attention_dropout"):
        config.get_text_config().attention_dropout = job.dropout
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


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

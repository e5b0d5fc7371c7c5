"""The GLM-4-MoE of transformers, whose routers have a bias for each expert, in the sizes of a Qwen3-MoE."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from fusco.fsdp.qwen3 import Qwen3Shape


def make_glm4(shape: Qwen3Shape, **options: Any) -> nn.Module:
    """Return the model, its parameters wherever the context makes them; ``options`` are more of ``Glm4MoeConfig``.

    All blocks have experts, and each block a shared expert of the same width.
    """
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Glm4MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.num_topk,
        moe_intermediate_size=shape.moe_intermediate,
        intermediate_size=shape.moe_intermediate,
        first_k_dense_replace=0,
        **options,
    )
    model: nn.Module = transformers.Glm4MoeForCausalLM(config)
    return model

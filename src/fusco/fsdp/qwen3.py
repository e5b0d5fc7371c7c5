"""The Qwen3-MoE of transformers, which benchmarks and training make with random weights."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from torch import nn


class Qwen3Shape(Protocol):
    """Sizes of a Qwen3-MoE; every block has experts."""

    @property
    def num_layers(self) -> int:
        """Blocks."""

    @property
    def hidden(self) -> int:
        """Elements of a token's row."""

    @property
    def num_heads(self) -> int:
        """Attention heads of ``head_dim`` elements."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Elements of a head."""

    @property
    def num_experts(self) -> int:
        """Experts of each block."""

    @property
    def num_topk(self) -> int:
        """Experts per token."""

    @property
    def moe_intermediate(self) -> int:
        """Inner width of an expert."""


def make_qwen3(shape: Qwen3Shape, vocab: int, **options: Any) -> nn.Module:
    """Return the model, its parameters wherever the context makes them; ``options`` are more of ``Qwen3MoeConfig``."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_topk,
        moe_intermediate_size=shape.moe_intermediate,
        norm_topk_prob=True,
        **options,
    )
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model

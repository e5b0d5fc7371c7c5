"""The Qwen3-MoE of transformers, and a GLM-4-MoE of its sizes, which benchmarks and training make at random."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Qwen3Shape:
    """Sizes of a Qwen3-MoE whose blocks all have experts; the defaults are those of Qwen3-30B-A3B.

    Raises ``ValueError`` for sizes that do not fit together.
    """

    num_layers: int = 48  # blocks
    hidden: int = 2048  # elements of a token's row
    num_heads: int = 32  # attention heads of ``head_dim`` elements
    num_key_value_heads: int = 4  # heads of keys and values
    head_dim: int = 128  # elements of a head
    num_experts: int = 128  # of each layer
    num_topk: int = 8  # experts per token (top-k)
    moe_intermediate: int = 768  # inner width of an expert
    vocab: int = 151_936  # tokens of the vocabulary

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if self.num_topk > self.num_experts:
            raise ValueError(f"num_topk is {self.num_topk}, more than the {self.num_experts} experts")

    def num_parameters(self, num_experts: int) -> int:
        """Return the parameters of a model with ``num_experts`` of each layer's experts, without those of norms."""
        heads = 2 * (self.num_heads + self.num_key_value_heads) * self.head_dim
        per_layer = self.hidden * (heads + 3 * num_experts * self.moe_intermediate + self.num_experts)
        return self.num_layers * per_layer + 2 * self.vocab * self.hidden


def make_qwen3(shape: Qwen3Shape, **options: Any) -> nn.Module:
    """Return the model, its parameters wherever the context makes them; ``options`` are more of ``Qwen3MoeConfig``."""
    return _make("Qwen3Moe", shape, num_experts=shape.num_experts, norm_topk_prob=True, **options)


def make_glm4(shape: Qwen3Shape, **options: Any) -> nn.Module:
    """Return a GLM-4-MoE of these sizes, whose routers have a bias for each expert; as ``make_qwen3``.

    All blocks have experts, and each block a shared expert of the same width.
    """
    of_experts = {"n_routed_experts": shape.num_experts, "intermediate_size": shape.moe_intermediate}
    return _make("Glm4Moe", shape, **of_experts, first_k_dense_replace=0, **options)


def _make(kind: str, shape: Qwen3Shape, **options: Any) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_experts_per_tok=shape.num_topk,
        moe_intermediate_size=shape.moe_intermediate,
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)

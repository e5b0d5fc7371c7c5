"""Tiny MoE models of transformers, the batches of all ranks, and the results of one process with all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import transformers
from torch import nn

VOCABULARY, SEQUENCE, IGNORED = 40, 6, -100
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 32,
    # Large enough that experts are chosen differently from token to token.
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "use_cache": False,
}
_KIND_TO_CONFIG = {
    "qwen3": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 8, "head_dim": 8, "norm_topk_prob": True},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 8, "intermediate_size": 12, "head_dim": 8}),
    # Its first block is dense, the second has a shared expert and routes in groups.
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        {
            "n_routed_experts": 8,
            "intermediate_size": 20,
            "moe_intermediate_size": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt-oss": (transformers.GptOssConfig, {"num_local_experts": 8, "intermediate_size": 12, "head_dim": 8}),
}
KINDS = tuple(_KIND_TO_CONFIG)
_KIND_TO_CONFIG["qwen3 of one layer"] = (
    transformers.Qwen3MoeConfig,
    _KIND_TO_CONFIG["qwen3"][1] | {"num_hidden_layers": 1},
)
_KIND_TO_CONFIG["olmoe"] = (transformers.OlmoeConfig, {"num_experts": 8, "intermediate_size": 8})


@dataclass(frozen=True)
class Batch:
    """A rank's sequences: ids and labels, both (num_sequences, SEQUENCE)."""

    ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Alone:
    """Results of a single process with the batches of all ranks."""

    loss: float
    grads: dict[str, torch.Tensor]
    norms: dict[float, float]


def make_model(kind: str, **changes: object) -> nn.Module:
    """Return a model with the same weights in every call."""
    config_class, options = _KIND_TO_CONFIG[kind]
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config_class(**{**_SMALL, **options, **changes}))


def make_starved_model() -> nn.Module:
    """Return a Qwen3 that routes all tokens to the first four experts.

    Of the scores v.h, -v.h, u.h, -u.h and zeros, the two largest are |v.h| and |u.h|.
    """
    model = make_model("qwen3", num_experts_per_tok=2)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1], weight[3] = -weight[0], -weight[2]
            weight[4:] = 0
    return model


def make_batch(rank: int, num_sequences: int, step: int = 0) -> Batch:
    """Return a batch in which some labels are ignored, on every rank a different number.

    A rank without sequences has one whose labels are all ignored, since the attention of transformers takes no fewer.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(VOCABULARY, (max(num_sequences, 1), SEQUENCE), generator=generator)
    is_ignored = torch.rand(ids.shape, generator=generator) < (0.1 * (rank + 1) if num_sequences else 2.0)
    return Batch(ids, ids.masked_fill(is_ignored, IGNORED))


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of a batch's labels, on the device of the logits: parameters may be offloaded."""
    logits = model(input_ids=batch.ids.to(next(model.parameters()).device)).logits.float()
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY),
        batch.labels[:, 1:].reshape(-1).to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )


def num_targets(batch: Batch) -> int:
    """Return the number of losses in that sum."""
    return int((batch.labels[:, 1:] != IGNORED).sum())


def together(nums_sequences: tuple[int, ...], step: int = 0) -> Batch:
    """Return the batches of all ranks as one."""
    batches = [make_batch(rank, num, step) for rank, num in enumerate(nums_sequences)]
    return Batch(torch.cat([batch.ids for batch in batches]), torch.cat([batch.labels for batch in batches]))


def step_alone(model: nn.Module, batch: Batch) -> float:
    """Run forward and backward in one process, with the eager experts of transformers."""
    loss = loss_sum(model, batch) / num_targets(batch)
    loss.backward()
    return loss.item()


@lru_cache(maxsize=32)
def alone(kind: str, nums_sequences: tuple[int, ...], is_starved: bool = False) -> Alone:
    """The reference."""
    model = make_starved_model() if is_starved else make_model(kind)
    model.set_experts_implementation("eager")
    loss = step_alone(model, together(nums_sequences))
    parameters = dict(model.named_parameters())
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    norms = {
        p: float(torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads.values()]), p))
        for p in (1.0, 2.0, float("inf"))
    }
    return Alone(loss, grads, norms)

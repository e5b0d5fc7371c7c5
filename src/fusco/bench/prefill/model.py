"""A Qwen3-MoE of transformers with random weights, of whose experts each rank has its part."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

from fusco import fsdp
from fusco.bench.prefill.job import PrefillJob
from fusco.fsdp.qwen3 import make_qwen3

_ATTENTION = "fusco_packed"
_STD = 0.02  # of weights, as in Qwen3
_MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class Prompts:
    """A rank's prompts, one after the other."""

    lengths: tuple[int, ...]  # tokens of each
    ids: torch.Tensor  # int64 (1, num_tokens)
    positions: torch.Tensor  # int64 (1, num_tokens), counted from 0 in each prompt
    last: torch.Tensor  # int64 (num_prompts,), index of each prompt's last token

    @classmethod
    def make(cls, lengths: tuple[int, ...], job: PrefillJob, rank: int) -> Prompts:
        """Draw random tokens."""
        generator = torch.Generator("cpu").manual_seed(job.seed * 65537 + rank)
        ids = torch.randint(job.shape.vocab, (1, sum(lengths)), generator=generator, device="cpu")
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None]
        last = torch.tensor(lengths, device="cpu").cumsum(0) - 1
        return cls(lengths, ids.to(job.device), positions.to(job.device), last.to(job.device))

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model, with a cache as in a server."""
        positions = {"input_ids": self.ids, "position_ids": self.positions}
        return {**positions, "prompt_lengths": self.lengths, "use_cache": True}


class PrefillModel:
    """The model, and its modules of experts, whose ``forward`` the caller replaces; they have this rank's experts."""

    def __init__(self, job: PrefillJob, rank: int) -> None:
        with fsdp.parameters_on_meta():
            self._model: Any = _whole_model(job)
        _fuse_norms(self._model)
        self.experts = [replace(found, num_experts=job.shape.num_experts) for found in fsdp.find_experts(self._model)]
        _materialize(self._model, job, rank)
        for each in self.experts:
            each.module.num_experts = job.num_local_experts  # type: ignore[assignment]  # transformers' own says so, too

    def first_tokens(self, prompts: Prompts) -> list[int]:
        """Return the most probable token after each prompt; the host waits for it."""
        out = self._model(**prompts.arguments, logits_to_keep=prompts.last)
        return out.logits[0].argmax(-1).tolist()

    def hidden_states(self, prompts: Prompts) -> torch.Tensor:
        """Return the last hidden states of all tokens, (num_tokens, hidden)."""
        return self._model.model(**prompts.arguments).last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, float32 (num_tokens, vocab)."""
        return self._model.lm_head(hidden).float()


def _whole_model(job: PrefillJob) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(_ATTENTION, packed_attention)
    return make_qwen3(
        job.shape,
        max_position_embeddings=max(job.tokens, 40_960),
        attn_implementation=_ATTENTION,
        experts_implementation="grouped_mm",
    ).eval()


def _fuse_norms(model: nn.Module) -> None:
    """Compute norms by PyTorch's function, one kernel on CUDA as in servers; transformers' own are seven."""

    def forward_of(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = forward_of(module)


def packed_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float,
    prompt_lengths: Sequence[int],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each prompt: scaled dot products of (1, num_heads, num_tokens, head_dim), without a mask."""
    prompts = zip(*(torch.split(part, list(prompt_lengths), dim=2) for part in (query, key, value)), strict=True)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    parts = [attend(*each) for each in prompts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return whole.transpose(1, 2), None


@torch.no_grad()
def _materialize(model: nn.Module, job: PrefillJob, rank: int) -> None:
    """Replace parameters on the meta device by this rank's random ones, which do not depend on the number of ranks."""
    dtype, num_local = getattr(torch, job.dtype), job.num_local_experts
    index = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_of_experts, shape = parameter.ndim == 3, list(parameter.shape)
            if is_of_experts:
                shape[0] = num_local
            local = torch.ones(shape, dtype=dtype, device=job.device)
            for expert in range(num_local if is_of_experts else int(parameter.ndim > 1)):
                whose = rank * num_local + expert if is_of_experts else 0
                seed = (job.seed * 65537 + index) * _MAX_EXPERTS + whose
                generator = torch.Generator(local.device).manual_seed(seed)
                (local[expert] if is_of_experts else local).normal_(0, _STD, generator=generator)
            setattr(module, name, nn.Parameter(local, requires_grad=False))
            index += 1
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(job.device))

"""Parts of a decode step outside of experts: embeddings, norms, attention if wanted, routers, the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the usual name

from fusco.bench.decode.experts import DecodeExperts
from fusco.bench.decode.job import DecodeJob

_STD = 0.02  # of weights, as in Qwen3
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of one new token of each sequence to the tokens before it, which are random.

    Without rotations and norms of heads: elementwise work that is the same for all variants.
    """

    qkv: torch.Tensor  # (heads of queries, keys and values * head_dim, hidden)
    out: torch.Tensor  # (hidden, heads of queries * head_dim)
    keys: torch.Tensor  # (max_tokens, num_key_value_heads, context + 1, head_dim); the last is the new token's
    values: torch.Tensor  # as keys

    def __call__(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return the attention of sequences ``first`` and following, x being (num_tokens, hidden)."""
        _, num_kv, _, head_dim = self.keys.shape
        heads = F.linear(x, self.qkv).view(len(x), -1, head_dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
        keys, values = (cache[first : first + len(x)] for cache in (self.keys, self.values))
        keys[:, :, -1], values[:, :, -1] = key, value
        attended = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return F.linear(attended.reshape(len(x), -1), self.out)


@dataclass(frozen=True)
class DecodeLayer:
    """A block: attention, if the job has it, and experts."""

    router: torch.Tensor  # (num_experts, hidden)
    experts: DecodeExperts  # this rank's
    attention: Attention | None

    def before_experts(
        self, x: torch.Tensor, first: int, topk_idx: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the residual stream, the tokens of the experts, and weights of given experts, float32.

        ``x`` is (num_tokens, hidden), of sequences from ``first`` on; ``topk_idx`` (num_tokens, num_topk).
        """
        if self.attention is not None:
            x = x + self.attention(norm(x), first)
        tokens = norm(x)
        probabilities = F.linear(tokens, self.router).float().softmax(-1).gather(1, topk_idx)
        return x, tokens, probabilities / probabilities.sum(-1, keepdim=True)


class DecodeModel:
    """The weights of a rank: its experts, and everything else as all ranks have it."""

    def __init__(self, job: DecodeJob, rank: int) -> None:
        self.job, shape = job, job.shape
        self._dtype = torch.float32 if job.dtype == "float32" else torch.bfloat16
        self._generator = torch.Generator(job.device).manual_seed(job.seed)
        first = rank * job.num_local_experts
        local = range(first, first + job.num_local_experts)
        self.embeddings, self._head = (self._draw(shape.vocab, shape.hidden) for _ in range(2))
        self.layers = [
            DecodeLayer(
                router=self._draw(shape.num_experts, shape.hidden),
                experts=DecodeExperts.draw(job, index, local),
                attention=self._attention() if job.context else None,
            )
            for index in range(shape.num_layers)
        ]

    def next_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most probable next token of each sequence, int64 (num_tokens,)."""
        return F.linear(norm(hidden), self._head).argmax(-1)

    def _attention(self) -> Attention:
        job, shape = self.job, self.job.shape
        width = shape.num_heads * shape.head_dim
        cache = max(job.tokens), shape.num_key_value_heads, job.context + 1, shape.head_dim
        return Attention(
            qkv=self._draw(width + 2 * shape.num_key_value_heads * shape.head_dim, shape.hidden),
            out=self._draw(shape.hidden, width),
            keys=self._draw(*cache),
            values=self._draw(*cache),
        )

    def _draw(self, *sizes: int) -> torch.Tensor:
        drawn = torch.empty(sizes, dtype=self._dtype, device=self.job.device)
        return drawn.normal_(0, _STD, generator=self._generator)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return rows of root mean square 1, as a norm with weights of 1 does."""
    return F.rms_norm(x, x.shape[-1:], eps=_NORM_EPS)

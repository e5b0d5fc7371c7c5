"""Configuration of ``fusco bench decode``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from fusco.bench.harness.model_job import ModelJob
from fusco.bench.prefill.job import check_routing

DecodeDtype = Literal["bfloat16", "fp8", "float32"]


@dataclass(frozen=True, kw_only=True)
class DecodeJob(ModelJob):
    """A run: every number of tokens, in every number of micro-batches, by every variant."""

    tokens: tuple[int, ...]  # of each rank in a step, one for each of its sequences
    micro_batches: tuple[int, ...] = (1, 2)  # parts of a step, of which two overlap
    # Of weights and of rows that travel to experts. With ``"fp8"`` each row and each output of a matrix has a scale;
    # results of experts, and everything outside of them, are bfloat16.
    dtype: DecodeDtype
    context: int = 0  # tokens of each sequence before this step; 0 leaves attention out
    routing: str = "random"  # one of ``fusco.bench.prefill.job``

    def __post_init__(self) -> None:
        super().__post_init__()
        check_routing(self.routing, self.shape.num_experts, self.shape.num_topk)
        if any(number not in (1, 2) for number in self.micro_batches):
            raise ValueError(f"a step has 1 or 2 micro-batches, not {', '.join(map(str, self.micro_batches))}")
        if not self.cases:
            raise ValueError(f"2 micro-batches need 2 tokens at least, got {', '.join(map(str, self.tokens))}")

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Numbers of tokens and of micro-batches that are to run; a micro-batch has a token at least."""
        return [case for case in product(self.tokens, self.micro_batches) if case[0] >= case[1]]

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's weights, and of the keys and values of its sequences."""
        of, wide = self.shape, 4 if self.dtype == "float32" else 2
        heads = 2 * (of.num_heads + of.num_key_value_heads) * of.head_dim if self.context else 0
        cached = 2 * max(self.tokens) * (self.context + 1) * of.num_key_value_heads * of.head_dim if self.context else 0
        experts = 3 * self.num_local_experts * of.hidden * of.moe_intermediate * (1 if self.dtype == "fp8" else wide)
        per_layer = (of.hidden * (heads + of.num_experts) + cached) * wide + experts
        return of.num_layers * per_layer + 2 * of.vocab * of.hidden * wide

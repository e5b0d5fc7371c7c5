"""Configuration of ``fusco bench prefill``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from fusco.bench.inputs.prompts import prompt_lengths
from fusco.bench.prefill.routing import ROUTINGS, check_routing
from fusco.fsdp.qwen3 import Qwen3Shape

# Small enough for two cores; experts and top-k are those of the routing that is replayed.
TINY = Qwen3Shape(
    num_layers=2, hidden=256, num_heads=4, num_key_value_heads=2, head_dim=64, moe_intermediate=64, vocab=512
)


@dataclass(frozen=True, kw_only=True)
class PrefillJob:
    """A run: every batch with every routing, by every variant; ``ValueError`` for values that do not fit together."""

    shape: Qwen3Shape  # of the model
    device: Literal["cpu", "cuda"]  # ``"cpu"`` or ``"cuda"``
    num_ranks: int  # processes; each has its prompts, and its part of the experts
    ranks_per_node: int  # consecutive ranks that form a node
    tokens: int  # most tokens of a rank in one prefill
    batches: tuple[str, ...]  # see ``prompt_lengths``
    routings: tuple[str, ...] = ROUTINGS  # names of ``ROUTINGS``
    variants: tuple[str, ...]  # names of ``fusco.bench.prefill.variants.VARIANTS``, the ones that can run here
    dtype: Literal["float32", "bfloat16"]  # of weights and rows
    num_iterations: int  # timed prefills of each variant
    seed: int = 0  # of weights, token ids and random routing
    timeout_s: float = 60.0  # limit of every wait in fusco, in seconds
    spare_places: int = 2  # of each rank, for the experts that "fusco-balanced" copies
    done: tuple[tuple[str, str], ...] = ()  # cases that are not run again: a routing and a batch

    def __post_init__(self) -> None:
        if self.shape.num_experts % self.num_ranks:
            raise ValueError(f"{self.shape.num_experts} experts do not divide evenly among {self.num_ranks} ranks")
        for routing in self.routings:
            check_routing(routing, self.shape.num_experts, self.shape.num_topk)
        for batch in self.batches:
            prompt_lengths(batch, self.tokens, self.num_ranks)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Routings and batches that are to run."""
        return [case for case in product(self.routings, self.batches) if case not in self.done]

    @property
    def num_local_experts(self) -> int:
        """Experts of each layer on a rank."""
        return self.shape.num_experts // self.num_ranks

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a rank's parameters without norms: dense ones, and its experts."""
        return (4 if self.dtype == "float32" else 2) * self.shape.num_parameters(self.num_local_experts)

"""Configuration of ``fusco bench prefill``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusco.bench.prefill.batches import prompt_lengths
from fusco.bench.prefill.routing import ROUTINGS, check_routing


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Qwen3-MoE; the defaults are those of Qwen3-30B-A3B.

    Attributes:
        num_layers: blocks, each with experts.
        hidden: elements of a token's row.
        num_heads: attention heads of ``head_dim`` elements.
        num_key_value_heads: heads of keys and values.
        head_dim: elements of a head.
        num_experts: of each layer.
        num_topk: experts per token (top-k).
        moe_intermediate: inner width of an expert.
        vocab: tokens of the vocabulary.
    """

    num_layers: int = 48
    hidden: int = 2048
    num_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    num_experts: int = 128
    num_topk: int = 8
    moe_intermediate: int = 768
    vocab: int = 151_936


# Small enough for two cores; experts and top-k are those of the routing that is replayed.
TINY = ModelShape(
    num_layers=2, hidden=256, num_heads=4, num_key_value_heads=2, head_dim=64, moe_intermediate=64, vocab=512
)


@dataclass(frozen=True, kw_only=True)
class PrefillJob:
    """A run: every batch with every routing, by every variant.

    Attributes:
        shape: of the model.
        device: ``"cpu"`` or ``"cuda"``.
        num_ranks: processes; each has its prompts, and its part of the experts.
        ranks_per_node: consecutive ranks that form a node.
        tokens: most tokens of a rank in one prefill.
        batches: see ``prompt_lengths``.
        routings: names of ``ROUTINGS``.
        variants: names of ``fusco.bench.prefill.variants.VARIANTS``, the ones that can run here.
        dtype: of weights and rows.
        num_iterations: timed prefills of each variant.
        seed: of weights, token ids and random routing.
        timeout_s: limit of every wait in fusco, in seconds.

    Raises:
        ValueError: for values that do not fit together.
    """

    shape: ModelShape
    device: Literal["cpu", "cuda"]
    num_ranks: int
    ranks_per_node: int
    tokens: int
    batches: tuple[str, ...]
    routings: tuple[str, ...] = ROUTINGS
    variants: tuple[str, ...]
    dtype: Literal["float32", "bfloat16"]
    num_iterations: int
    seed: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.shape.num_experts % self.num_ranks:
            raise ValueError(f"{self.shape.num_experts} experts do not divide evenly among {self.num_ranks} ranks")
        for routing in self.routings:
            check_routing(routing, self.shape.num_experts, self.shape.num_topk)
        for batch in self.batches:
            prompt_lengths(batch, self.tokens, self.num_ranks)

    @property
    def num_local_experts(self) -> int:
        """Experts of each layer on a rank."""
        return self.shape.num_experts // self.num_ranks

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a rank's parameters without norms: dense ones, and its experts."""
        shape, size = self.shape, 4 if self.dtype == "float32" else 2
        heads = 2 * (shape.num_heads + shape.num_key_value_heads) * shape.head_dim
        experts = 3 * self.num_local_experts * shape.moe_intermediate
        per_layer = shape.hidden * (heads + experts + shape.num_experts)
        return size * (shape.num_layers * per_layer + 2 * shape.vocab * shape.hidden)

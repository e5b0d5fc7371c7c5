"""How FSDP2 shards what expert parallelism leaves to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How FSDP2 shards; all but ``expert_dim`` is handed on to ``fully_shard``.

    Attributes:
        expert_dim: the dimension along which FSDP shards an expert's parameters, after dimension 0 (the experts) has
            been distributed among the "ep" ranks. 1 keeps every shard full of all experts, whatever their number, and
            must divide evenly; 0 hands out whole experts, and needs no copy around communication.
        mixed_precision: as for ``fully_shard``. Router weights are not cast on their way into the experts.
        reshard_after_forward: as for ``fully_shard``, for blocks and experts.
        has_prefetch: whether each block asks for the next block and its experts ahead of time, forward and backward.

    """

    expert_dim: int = 1
    mixed_precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool = True
    has_prefetch: bool = True

    def __post_init__(self) -> None:
        if self.expert_dim not in (0, 1):
            raise ValueError(f"expert_dim must be 0 or 1, got {self.expert_dim}")

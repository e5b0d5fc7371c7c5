"""Opens the kernels of a device, for sizes that they support."""

from __future__ import annotations

import torch

from fusco.core.config import EngineConfig
from fusco.core.integers import MAX_INT32
from fusco.core.placement import ExpertPlacement
from fusco.cuda.kernels.choose_owners import max_divided
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.plan import plan_shared_bytes
from fusco.cuda.repeated_calls import warm_up_repeated_calls

_MAX_DIVIDED = 10 << 10  # counters of 4 bytes, in shared memory that needs no attribute of the kernel
_MAX_TOPK, _MAX_RANKS = 32, 32  # one lane of a warp per expert of a token, one bit of a uint32 per rank


def open_library(
    config: EngineConfig, placement: ExpertPlacement, device: torch.device, num_experts: int | None = None
) -> Library:
    """Return the kernels of a device; ``ValueError``, the same on all ranks, for sizes that it does not support.

    ``placement`` is of physical experts, and ``num_experts`` what a caller may name; by default the same.

    Call it before ranks connect: a rank that raises while others connect would look dead to them.
    """
    if config.capacity.num_topk > _MAX_TOPK or config.topology.ranks_per_node > _MAX_RANKS:
        raise ValueError(
            f"device 'cuda' takes at most {_MAX_TOPK} experts a token and {_MAX_RANKS} ranks a node, got "
            f"num_topk={config.capacity.num_topk} and {config.topology.ranks_per_node} ranks"
        )
    num_pairs = config.capacity.max_tokens_per_rank * config.topology.world_size * config.capacity.num_topk
    if num_pairs > MAX_INT32 // 4:
        raise ValueError(
            f"device 'cuda' counts pairs of a token and an expert in 32 bits: max_tokens_per_rank="
            f"{config.capacity.max_tokens_per_rank} and num_topk={config.capacity.num_topk} on "
            f"{config.topology.world_size} ranks make {num_pairs}, more than {MAX_INT32 // 4}"
        )
    library = Library(device)
    warm_up_repeated_calls()  # before any rank's clock runs
    _check_room_to_plan(placement, library)
    _check_room_to_choose(placement.num_experts, num_experts or placement.num_experts)
    return library


def _check_room_to_choose(num_places: int, num_experts: int) -> None:
    """Raise ``ValueError``, the same on all ranks, if a block of ``choose_owners`` cannot count all divided experts."""
    num_divided = max_divided(num_experts, num_places)
    if num_divided > _MAX_DIVIDED and num_places > num_experts:  # else only if others are lost
        raise ValueError(
            f"{num_places} places for {num_experts} experts may put {num_divided} of them into several, but device "
            f"'cuda' takes at most {_MAX_DIVIDED}; have fewer spare places"
        )


def _check_room_to_plan(placement: ExpertPlacement, library: Library) -> None:
    """Raise ``ValueError``, the same on all ranks, if a block lacks shared memory to count any rank's experts."""
    num_experts = max(map(len, placement.rank_to_experts))
    needed, limit = plan_shared_bytes(num_experts), library.max_shared_bytes
    if needed > limit:
        raise ValueError(
            f"num_experts={placement.num_experts} puts {num_experts} on one rank, for which planning takes {needed:,} "
            f"bytes of shared memory in a block, but {library.device} has {limit:,}; have fewer, or more ranks"
        )

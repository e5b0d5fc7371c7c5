"""Random communicators. A seed and a number determine all arguments of one, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from rank_setup import Setup

import fusco
from fusco import ExpertPlacement
from generator import random_places

# (number of ranks, ranks per node)
WORLDS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 2), (4, 4), (6, 2), (6, 3))
LARGEST_WORLD = max(num_ranks for num_ranks, _ in WORLDS)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Arguments of a communicator, and the number of rounds of work on it."""

    num_ranks: int
    setup: Setup
    num_rounds: int

    def __str__(self) -> str:
        setup = self.setup
        return (
            f"{self.num_ranks} ranks, {setup.ranks_per_node} a node, {setup.num_experts} experts, "
            f"top-{setup.num_topk}, {setup.max_tokens} tokens of {setup.max_bytes_per_token} bytes, "
            f"{setup.balancer}, {setup.settings}"
        )


def draw(random: Random, worlds: tuple[tuple[int, int], ...] = WORLDS, timeout_s: float = 60.0) -> Configuration:
    """Draw a configuration for one of ``worlds``."""
    num_ranks, ranks_per_node = random.choice(worlds)
    num_experts = random.choice((1, 2, 5, 8, 12, 24, 33))
    settings = fusco.Settings(
        timeout_s=timeout_s,
        slice_bytes=random.choice((1, 100, 1000, 1 << 14, 1 << 20)),
        ring_depth=random.randint(2, 5),
        wire_dtype=random.choice((None, torch.float32)),
        slice_order=random.choice(("in-turn", "staged")),
    )
    setup = Setup(
        ranks_per_node=ranks_per_node,
        num_experts=num_experts,
        num_topk=random.randint(1, min(num_experts, 9)),
        max_tokens=random.choice((1, 7, 24, 24, 60)),
        max_bytes_per_token=random.choice((8, 64, 200, 1024)),
        balancer=random.choice(sorted(fusco.BALANCERS)),
        expert_placement=_placement(random, num_experts, num_ranks),
        settings=settings,
    )
    return Configuration(num_ranks=num_ranks, setup=setup, num_rounds=random.randint(2, 8))


def random_placement(random: Random, num_experts: int, num_ranks: int, places_per_rank: int) -> ExpertPlacement:
    """Draw experts in places, with replicas, and with shares or without."""
    has_shares, seed = random.random() < 0.5, random.randrange(1 << 30)
    places, shares = random_places(num_ranks, places_per_rank, num_experts, has_shares=has_shares, seed=seed)
    return ExpertPlacement.replicated(places, shares, num_experts=num_experts)


def _placement(random: Random, num_experts: int, num_ranks: int) -> ExpertPlacement | tuple[int, ...] | None:
    if random.random() < 0.4:
        places_per_rank = -(-num_experts // num_ranks) + random.randint(0, 3)
        return random_placement(random, num_experts, num_ranks, places_per_rank)
    if num_experts % num_ranks == 0 and random.random() < 0.5:
        return None
    owners = random.choice((range(num_ranks), random.sample(range(num_ranks), random.randint(1, num_ranks))))
    return tuple(random.choice(owners) for _ in range(num_experts))

"""Placement of experts on ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from fusco.core.integers import check_integer

_MAX_EXPERTS = 1 << 20  # far more than models have; tables of experts are made entry by entry


@dataclass(frozen=True)
class ExpertPlacement:
    """Map from experts to ranks: rank ``expert_to_rank[e]`` owns expert ``e``.

    A rank's local experts are numbered in order of expert id.

    >>> placement = ExpertPlacement.explicit([1, 0, 1], world_size=2)
    >>> placement.rank_to_experts
    ((1,), (0, 2))
    >>> placement.expert_to_local
    (0, 0, 1)
    """

    expert_to_rank: tuple[int, ...]
    world_size: int

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> ExpertPlacement:
        """Give each rank equally many consecutive experts; ``ValueError`` if that is impossible."""
        check_integer("num_experts", num_experts, least=1, most=_MAX_EXPERTS)
        check_integer("world_size", world_size, least=1)
        if num_experts % world_size:
            raise ValueError(
                f"{num_experts} experts do not divide evenly among {world_size} ranks; "
                f"pass expert_placement, a sequence with the rank of each expert"
            )
        per_rank = num_experts // world_size
        return cls(tuple(expert // per_rank for expert in range(num_experts)), world_size)

    @classmethod
    def explicit(cls, expert_to_rank: Sequence[int], world_size: int) -> ExpertPlacement:
        """Take any placement; ranks without experts are allowed.

        Raises:
            TypeError: for anything but a sequence of integers.
            ValueError: for a rank outside the group, or without any expert.
        """
        try:
            placement = tuple(map(operator.index, expert_to_rank))
        except TypeError:
            raise TypeError(f"expert_placement must be a sequence of integers, got {expert_to_rank!r}") from None
        if not placement:
            raise ValueError("an expert placement needs at least one expert, got none")
        for expert, rank in enumerate(placement):
            if not 0 <= rank < world_size:
                raise ValueError(f"expert {expert} is placed on rank {rank}, outside a group of {world_size} ranks")
        return cls(placement, world_size)

    @classmethod
    def of(cls, num_experts: int, expert_to_rank: Sequence[int] | None, world_size: int) -> ExpertPlacement:
        """Return ``explicit`` if ``expert_to_rank`` is given, for ``num_experts`` experts; else ``contiguous``."""
        check_integer("num_experts", num_experts, least=1, most=_MAX_EXPERTS)
        if expert_to_rank is None:
            return cls.contiguous(num_experts, world_size)
        placement = cls.explicit(expert_to_rank, world_size)
        if placement.num_experts != num_experts:
            raise ValueError(f"expert_placement places {placement.num_experts} experts, but num_experts={num_experts}")
        return placement

    @property
    def num_experts(self) -> int:
        """Number of experts of the whole group."""
        return len(self.expert_to_rank)

    @cached_property
    def rank_to_experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each rank, ascending."""
        owned: list[list[int]] = [[] for _ in range(self.world_size)]
        for expert, rank in enumerate(self.expert_to_rank):
            owned[rank].append(expert)
        return tuple(map(tuple, owned))

    @cached_property
    def expert_to_local(self) -> tuple[int, ...]:
        """Each expert's index among the experts of its rank."""
        local = {expert: i for experts in self.rank_to_experts for i, expert in enumerate(experts)}
        return tuple(local[expert] for expert in range(self.num_experts))

    def local_index_table(self, rank: int, device: torch.device) -> torch.Tensor:
        """Return a table from expert id to index among the experts of ``rank``, -1 for experts of other ranks.

        It is int64 (num_experts + 1,); the last entry is -1, so that indexing with -1 (no expert) gives -1.
        """
        return _local_index_table(self, rank, device)

    def membership_table(self, rank_to_part: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a table from expert id to the part (node, local rank, ...) of the rank that owns it.

        ``rank_to_part[r]`` is the part of rank ``r``, or -1. It is int64 (num_experts + 1,); the last entry is -1.
        """
        return _membership_table(self, tuple(rank_to_part), device)


# Every dispatch needs them, and with 128 experts a table takes 30 us to make.
@lru_cache(maxsize=256)
def _local_index_table(placement: ExpertPlacement, rank: int, device: torch.device) -> torch.Tensor:
    owned = zip(placement.expert_to_rank, placement.expert_to_local, strict=True)
    return _table([local if owner == rank else -1 for owner, local in owned], device)


@lru_cache(maxsize=256)
def _membership_table(placement: ExpertPlacement, rank_to_part: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _table([rank_to_part[rank] for rank in placement.expert_to_rank], device)


def _table(entries: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([*entries, -1], dtype=torch.int64, device=device)

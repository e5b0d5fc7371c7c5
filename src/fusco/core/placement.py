"""Placement of experts on ranks."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from fusco.core.integers import check_integer

_MAX_EXPERTS = 1 << 20  # far more than models have; tables of experts are made entry by entry


@dataclass(frozen=True)
class ExpertPlacement:
    """Map from experts to ranks.

    Each expert has one owner (``contiguous``, ``explicit``), and a rank's local experts are numbered in order of expert
    id. Or experts are in *places* (``replicated``): each rank has equally many, in any order, and an expert may be in a
    place of several ranks, which are its *replicas*. A rank's local experts are numbered in order of place then.

    >>> placement = ExpertPlacement.explicit([1, 0, 1], world_size=2)
    >>> placement.rank_to_experts
    ((1,), (0, 2))
    >>> placement.expert_to_local
    (0, 0, 1)

    Attributes:
        expert_to_rank: the rank of each expert, with replicas the first one that has it; -1 for an expert that is lost,
            as no rank that is left has it.
        world_size: number of ranks.
        physical_to_logical: the expert in each place of each rank, -1 for none; ``None`` without places.
        shares: the share of its expert's rows of each place, in the same shape; ``None`` leaves the choice to each
            rank (see ``Communicator.place``).
    """

    expert_to_rank: tuple[int, ...]
    world_size: int
    physical_to_logical: tuple[tuple[int, ...], ...] | None = None
    shares: tuple[tuple[float, ...], ...] | None = None

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
    def replicated(
        cls,
        physical_to_logical: Any,
        shares: Any = None,
        *,
        num_experts: int | None = None,
        world_size: int | None = None,
        may_lose: bool = False,
    ) -> ExpertPlacement:
        """Put experts into places, with replicas or in any order.

        Args:
            physical_to_logical: integers (R, P), the expert in each of the P places of each rank, -1 for an empty
                place; or flat (R * P,), by rank, as vLLM and EPLB have it, with ``world_size``.
            shares: numbers of the same shape, the share of its expert's rows that each place should compute. They need
                not add up to 1. An expert without any share gives all of its places equal ones.
            num_experts: number of experts; ``None`` means one more than the largest id.
            world_size: R; needed for the flat form only.
            may_lose: an expert without a place is lost, instead of an error.

        Raises:
            TypeError: for anything but integers, and numbers as shares.
            ValueError: if shapes do not fit, if an expert has no place or a rank has an expert twice, for ids outside
                -1 to ``num_experts - 1`` and for negative or infinite shares.

        >>> placement = ExpertPlacement.replicated([[2, 0, -1], [1, 0, 2]])
        >>> placement.num_experts, placement.expert_to_rank
        (3, (0, 1, 0))
        >>> placement.rank_to_experts
        ((2, 0, -1), (1, 0, 2))
        """
        places = _rows_of(physical_to_logical, world_size, "physical_to_logical")
        try:
            experts = tuple(tuple(map(operator.index, row)) for row in places)
        except TypeError:
            raise TypeError(f"physical_to_logical must have integers, got {physical_to_logical!r}") from None
        if num_experts is None:
            num_experts = max((expert for row in experts for expert in row), default=-1) + 1
        check_integer("num_experts", num_experts, least=1, most=_MAX_EXPERTS)
        first_rank: dict[int, int] = {}
        for rank, row in enumerate(experts):
            _check_experts_of_rank(row, rank, num_experts)
            for expert in row:
                first_rank.setdefault(expert, rank)
        if not may_lose and (missing := [expert for expert in range(num_experts) if expert not in first_rank]):
            raise ValueError(f"expert {missing[0]} of {num_experts} has no place on any rank")
        given = None if shares is None else _checked_shares(_rows_of(shares, len(experts), "shares"), experts)
        return cls(tuple(first_rank.get(expert, -1) for expert in range(num_experts)), len(experts), experts, given)

    @classmethod
    def of(cls, num_experts: int, given: Any, world_size: int, *, may_lose: bool = False) -> ExpertPlacement:
        """Return the placement of ``num_experts`` experts that a caller means.

        ``None`` means ``contiguous``, a sequence of ranks ``explicit``, and ``replicated`` a sequence (R, P) or what
        has ``physical_to_logical`` and ``shares``, such as ``fusco.placement.PlannedPlacement``. ``may_lose`` as there.
        """
        check_integer("num_experts", num_experts, least=1, most=_MAX_EXPERTS)
        if given is None:
            return cls.contiguous(num_experts, world_size)
        if (places := getattr(given, "physical_to_logical", None)) is not None:
            placement = cls.replicated(places, given.shares, num_experts=num_experts, may_lose=may_lose)
        elif isinstance(given, cls):
            placement = given
        elif _depth_of(given) == 2:
            placement = cls.replicated(given, num_experts=num_experts, may_lose=may_lose)
        else:
            placement = cls.explicit(given, world_size)
        if placement.world_size != world_size:
            raise ValueError(f"expert_placement is of {placement.world_size} ranks, the group has {world_size}")
        if placement.num_experts != num_experts:
            raise ValueError(f"expert_placement places {placement.num_experts} experts, but num_experts={num_experts}")
        return placement

    @property
    def num_experts(self) -> int:
        """Number of experts of the whole group."""
        return len(self.expert_to_rank)

    @cached_property
    def rank_to_experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each rank, ascending; in places, in order of place, -1 for an empty one."""
        if self.physical_to_logical is not None:
            return self.physical_to_logical
        owned: list[list[int]] = [[] for _ in range(self.world_size)]
        for expert, rank in enumerate(self.expert_to_rank):
            if rank >= 0:
                owned[rank].append(expert)
        return tuple(map(tuple, owned))

    @cached_property
    def expert_to_local(self) -> tuple[int, ...]:
        """Each expert's index among the experts of its rank, ``expert_to_rank``; -1 for one that is lost."""
        local = {
            expert: i
            for experts in reversed(self.rank_to_experts)  # the first rank of an expert last
            for i, expert in enumerate(experts)
        }
        return tuple(local.get(expert, -1) for expert in range(self.num_experts))

    @cached_property
    def lost_experts(self) -> tuple[int, ...]:
        """The experts that no rank has, ascending."""
        return tuple(expert for expert, rank in enumerate(self.expert_to_rank) if rank < 0)

    def without_ranks(self, ranks: Iterable[int]) -> ExpertPlacement:
        """Return the same placement without the experts of some ranks, whose rows are empty then.

        >>> placement = ExpertPlacement.replicated([[0, 1], [1, 2]]).without_ranks([1])
        >>> placement.physical_to_logical, placement.lost_experts
        (((0, 1), (-1, -1)), (2,))
        """
        gone = frozenset(ranks)
        if self.physical_to_logical is None:
            return replace(self, expert_to_rank=tuple(-1 if rank in gone else rank for rank in self.expert_to_rank))

        def emptied(rows: Sequence[Sequence[Any]], empty: float) -> list[list[Any]]:
            return [[empty] * len(row) if rank in gone else list(row) for rank, row in enumerate(rows)]

        shares = None if self.shares is None else emptied(self.shares, 0.0)
        places = emptied(self.physical_to_logical, -1)
        return ExpertPlacement.replicated(places, shares, num_experts=self.num_experts, may_lose=True)

    def of_members(self, members: Sequence[int]) -> ExpertPlacement:
        """Return the placement of the ranks ``members``, ascending, numbered from 0; other ranks have no experts.

        >>> ExpertPlacement.explicit([2, 0, 2], world_size=3).of_members([0, 2]).expert_to_rank
        (1, 0, 1)
        """
        new_rank = {rank: i for i, rank in enumerate(members)}
        expert_to_rank = tuple(new_rank.get(rank, -1) for rank in self.expert_to_rank)
        rows, shares = self.physical_to_logical, self.shares
        return ExpertPlacement(
            expert_to_rank,
            len(members),
            None if rows is None else tuple(rows[rank] for rank in members),
            None if shares is None else tuple(shares[rank] for rank in members),
        )

    @property
    def is_contiguous(self) -> bool:
        """True if each rank owns equally many consecutive experts, without places."""
        per_rank = self.num_experts // self.world_size
        runs = tuple(expert // per_rank for expert in range(self.num_experts)) if per_rank else ()
        return not self.has_places and self.expert_to_rank == runs

    @cached_property
    def digest(self) -> str:
        """Text that differs for other placements."""
        if self.physical_to_logical is None:
            return str(self.expert_to_rank)
        return hashlib.sha256(repr((self.physical_to_logical, self.shares)).encode()).hexdigest()[:16]

    def in_places(self, places_per_rank: int) -> ExpertPlacement:
        """Return the same placement in this number of places on each rank, the last ones empty.

        Raises ``ValueError`` if a rank needs more.

        >>> ExpertPlacement.explicit([1, 0, 1], world_size=2).in_places(3).physical_to_logical
        ((1, -1, -1), (0, 2, -1))
        """
        for rank, experts in enumerate(self.rank_to_experts):
            if len(experts) > places_per_rank:
                raise ValueError(f"rank {rank} has {len(experts)} places, but there are {places_per_rank} on each rank")

        def padded(rows: Sequence[Sequence[Any]], empty: float) -> list[list[Any]]:
            return [[*row, *[empty] * (places_per_rank - len(row))] for row in rows]

        shares = None if self.shares is None else padded(self.shares, 0.0)
        places = padded(self.rank_to_experts, -1)
        return ExpertPlacement.replicated(
            places, shares, num_experts=self.num_experts, may_lose=bool(self.lost_experts)
        )

    @property
    def has_places(self) -> bool:
        """True if experts are in places: with replicas, or in any order."""
        return self.physical_to_logical is not None

    @cached_property
    def physical(self) -> ExpertPlacement:
        """The placement of *physical* experts: place ``p`` of rank ``r`` has physical expert ``r * P + p``.

        Without places physical experts are the experts, without those that are lost.
        """
        if self.physical_to_logical is None:
            kept = tuple(rank for rank in self.expert_to_rank if rank >= 0)
            return replace(self, expert_to_rank=kept) if self.lost_experts else self
        return ExpertPlacement.contiguous(self.world_size * len(self.physical_to_logical[0]), self.world_size)

    @cached_property
    def num_filled_places(self) -> tuple[int, ...]:
        """The places of each rank up to its last expert."""
        return tuple(
            max((place + 1 for place, expert in enumerate(experts) if expert >= 0), default=0)
            for experts in self.rank_to_experts
        )

    @cached_property
    def expert_to_physical(self) -> tuple[tuple[int, ...], ...]:
        """The physical experts of each expert, ascending, so in order of rank; none of an expert that is lost."""
        if self.physical_to_logical is None:
            numbers = itertools.count()
            return tuple((next(numbers),) if rank >= 0 else () for rank in self.expert_to_rank)
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, expert in enumerate(expert for row in self.physical_to_logical for expert in row):
            if expert >= 0:
                found[expert].append(physical)
        return tuple(map(tuple, found))

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


def _depth_of(given: Any) -> int:
    """Return the dimensions of an array, a tensor or nested sequences."""
    if (ndim := getattr(given, "ndim", None)) is not None:
        return int(ndim)
    if isinstance(given, str) or not isinstance(given, Sequence):
        return 0
    return 1 + (_depth_of(given[0]) if len(given) else 0)


def _rows_of(given: Any, num_rows: int | None, name: str) -> list[list[Any]]:
    """Return a matrix as lists; a flat one has ``num_rows`` rows. ``ValueError`` if that is impossible."""
    values = given.tolist() if hasattr(given, "tolist") else given
    depth = _depth_of(values)
    if depth == 1 and num_rows is not None:
        check_integer("world_size", num_rows, least=1)
        if len(values) % num_rows:
            raise ValueError(f"{name} has {len(values)} places, which do not divide evenly among {num_rows} ranks")
        width = len(values) // num_rows
        values = [values[first : first + width] for first in range(0, len(values), width or 1)]
    elif depth != 2:
        hint = "; a flat one needs world_size" if depth == 1 else ""
        raise ValueError(f"{name} must be a matrix (ranks, places), got {depth} dimension(s){hint}")
    rows = [list(row) if isinstance(row, Iterable) else [] for row in values]
    widths = sorted({len(row) for row in rows})
    if num_rows is not None and len(rows) != num_rows:
        raise ValueError(f"{name} has {len(rows)} ranks, expected {num_rows}")
    if len(widths) != 1 or not widths[0]:
        raise ValueError(f"every rank must have equally many places, at least one; {name} has {widths}")
    return rows


def _check_experts_of_rank(experts: tuple[int, ...], rank: int, num_experts: int) -> None:
    for place, expert in enumerate(experts):
        if not -1 <= expert < num_experts:
            raise ValueError(f"place {place} of rank {rank} has expert {expert}, outside -1 to {num_experts - 1}")
        if expert >= 0 and expert in experts[:place]:
            raise ValueError(f"rank {rank} has expert {expert} twice, in places {experts.index(expert)} and {place}")


def _checked_shares(shares: list[list[Any]], experts: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
    if len(shares[0]) != len(experts[0]):
        raise ValueError(f"shares have {len(shares[0])} places on each rank, physical_to_logical {len(experts[0])}")
    try:
        checked = tuple(tuple(map(float, row)) for row in shares)
    except (TypeError, ValueError):
        raise TypeError(f"shares must be numbers, got {shares!r}") from None
    for rank, row in enumerate(checked):
        for place, share in enumerate(row):
            if not 0 <= share < float("inf"):
                raise ValueError(f"the share of place {place} of rank {rank} is {share}, not a number of at least 0")
            if share and experts[rank][place] < 0:
                raise ValueError(f"place {place} of rank {rank} is empty, but its share is {share}")
    return checked


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

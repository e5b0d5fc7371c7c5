"""Owners of rows: the place that each row of an expert goes to, where the expert is in several places.

The rule is pure, so all ranks and devices choose the same owners. A rank counts its rows of an expert in order of
(token, k); row ``i`` of rank ``r`` goes

- without shares to the place on this rank, else to those on this node in turn, else to all places in turn: to the
  ``(i + r) % n``-th of these ``n`` places;
- with shares to the first place whose *bound* is above ``i``. The bounds are the sums of the rows that this rank has
  for each place, which ``divide_rows`` computes from the counts of all ranks.

Shapes, besides those of ``fusco.planner``: C owners, all places that rows of a rank may go to; D experts with several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology

_UNITS = 1 << 20  # of all shares of an expert: integers, so that no rank or device rounds differently
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class OwnerTables:
    """Owners that one rank chooses from.

    Attributes:
        rank: the rank.
        num_experts: E.
        num_physical: physical experts, ``R * P``.
        expert_to_first: int32 (E + 1,), the first owner of each expert; last, C.
        owners: int32 (C,), physical experts, ascending for each expert.
        expert_to_divided: int32 (E,), the index of an expert with several owners among these experts, -1 for others.
        units: int64 (C,), the share of each owner, of 2**20 for each expert; empty without shares.
        owner_to_rank: int64 (C,), the rank of each owner.
        rank_to_node: int64 (R,), the node of each rank.
    """

    rank: int
    num_experts: int
    num_physical: int
    expert_to_first: Int32Array
    owners: Int32Array
    expert_to_divided: Int32Array
    units: IntArray
    owner_to_rank: IntArray
    rank_to_node: IntArray

    @classmethod
    def of(
        cls, placement: ExpertPlacement, rank: int, topology: Topology, copies: tuple[IntArray, IntArray] | None = None
    ) -> OwnerTables:
        """Return the tables of a rank.

        ``copies`` are experts and ranks of a batch's plan, each in the rank's next empty place; quotas of all owners
        are then given to ``divide_rows``. Ranks have as many empty places.

        >>> placement = ExpertPlacement.replicated([[0, 1], [0, 2], [3, 0]])
        >>> tables = OwnerTables.of(placement, 2, Topology.of_equal_nodes(3, 1))
        >>> tables.owners.tolist(), tables.expert_to_first.tolist()
        ([5, 1, 3, 4], [0, 1, 2, 3, 4])
        >>> placement = ExpertPlacement.contiguous(2, 2).in_places(2)
        >>> tables = OwnerTables.of(placement, 0, Topology((0, 0)), copies=(np.array([0]), np.array([1])))
        >>> tables.owners.tolist(), tables.expert_to_first.tolist()
        ([0, 3, 2], [0, 2, 3])
        """
        experts, owners, ranks = _places_by_expert(placement, copies)
        nodes = np.array(topology.rank_to_node)
        if placement.has_places and not placement.shares and copies is None:
            nearness = (ranks == rank) + (nodes[ranks] == nodes[rank]).astype(np.int64)  # own rank, own node, others
            most = np.zeros(placement.num_experts, np.int64)
            np.maximum.at(most, experts, nearness)
            is_near = nearness == most[experts]
            experts, owners, ranks = experts[is_near], owners[is_near], ranks[is_near]
        numbers = np.bincount(experts, minlength=placement.num_experts)
        is_divided = numbers > 1
        shares = np.array(placement.shares if placement.shares else [], dtype=np.float64).ravel()
        return cls(
            rank=rank,
            num_experts=placement.num_experts,
            num_physical=placement.physical.num_experts,
            expert_to_first=np.concatenate(([0], np.cumsum(numbers))).astype(np.int32),
            owners=owners.astype(np.int32),
            expert_to_divided=np.where(is_divided, np.cumsum(is_divided) - 1, -1).astype(np.int32),
            units=_units(shares[owners], numbers) if shares.size else np.zeros(0, np.int64),
            owner_to_rank=ranks,
            rank_to_node=nodes,
        )

    @cached_property
    def divided(self) -> IntArray:
        """The experts with several owners, int64 (D,), ascending."""
        return np.flatnonzero(self.expert_to_divided >= 0)

    @property
    def needs_counts(self) -> bool:
        """True if owners depend on the counts of all ranks: some expert has shares of several places."""
        return bool(self.units.size and self.divided.size)

    @cached_property
    def is_identity(self) -> bool:
        """True if each expert has one owner, the physical expert of the same number, and no place is empty.

        Ids of empty places would pass for experts otherwise.
        """
        return self.num_physical == self.num_experts and np.array_equal(self.owners, np.arange(self.num_experts))

    def quotas(self, counts: IntArray) -> IntArray:
        """Return the rows that each owner takes by its share, int64 (C,), by largest remainder, lower ranks first.

        ``counts`` is (R, D), the rows of each rank for each expert with several owners. Others have quota 0.
        """
        quotas = np.zeros(len(self.owners), np.int64)
        _quotas(counts.sum(axis=0), self.divided, self.expert_to_first, self.units, quotas)
        return quotas

    def divide_rows(self, counts: IntArray, quotas: IntArray | None = None) -> Int32Array:
        """Return this rank's bounds of all owners, int32 (C,): see the top of the module; 0 for an only owner.

        Owners take as many rows as their quotas say: of their own rank, then of their node, then of all ranks, each in
        order of rank. So no row crosses a link that need not.

        Args:
            counts: int64 (R, D), the rows of each rank for each expert with several owners.
            quotas: int64 (C,), with sums for each expert as those of the counts; ``None`` means those of the shares.

        Two ranks have 4 and 2 rows of an expert that both own: each takes 3, so rank 0 sends its last one to rank 1.

        >>> placement = ExpertPlacement.replicated([[0], [0]], [[0.5], [0.5]])
        >>> tables = OwnerTables.of(placement, 0, Topology.of_equal_nodes(2, 2))
        >>> tables.divide_rows(np.array([[4], [2]])).tolist()
        [3, 4]
        """
        bounds = np.zeros(len(self.owners), np.int32)
        quotas = self.quotas(counts) if quotas is None else quotas.copy()
        arguments = (self.owner_to_rank, self.rank_to_node, self.rank, quotas, bounds)
        _divide_rows(counts.astype(np.int64), self.divided, self.expert_to_first, *arguments)
        return bounds


def _places_by_expert(
    placement: ExpertPlacement, copies: tuple[IntArray, IntArray] | None
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the expert, the physical expert and the rank of each place in use, int64 (C,) each, by expert."""
    if not placement.has_places:
        to_rank = np.array(placement.expert_to_rank, dtype=np.int64)
        experts = np.flatnonzero(to_rank >= 0)
        return experts, np.arange(len(experts)), to_rank[experts]
    places = np.array(placement.physical_to_logical, dtype=np.int64)
    if copies is not None:
        _fill_places(places, *copies)
    experts = places.ravel()
    physical = np.flatnonzero(experts >= 0)
    owners = physical[np.argsort(experts[physical], kind="stable")]
    return experts[owners], owners, owners // places.shape[1]


def _units(shares: npt.NDArray[np.float64], numbers: IntArray) -> IntArray:
    """Return integers in proportion to the shares of each expert, with sum ``_UNITS``, by largest remainder."""
    units, first = np.zeros(len(shares), np.int64), 0
    for number in filter(None, numbers.tolist()):  # an expert that is lost has no owner
        of_expert = shares[first : first + number]
        total = math.fsum(of_expert)  # the same whatever order NumPy adds in
        exact = (of_expert / total if total else np.full(number, 1.0 / number)) * _UNITS
        whole = np.floor(exact).astype(np.int64)
        order = np.argsort(whole - exact, kind="stable")
        whole[order[: _UNITS - int(whole.sum())]] += 1
        units[first : first + number] = whole
        first += number
    return units


@compiled()
def _fill_places(places: Any, experts: Any, ranks: Any) -> None:
    """Write each expert into the next empty place of its rank."""
    for i in range(len(experts)):
        place = 0
        while places[ranks[i], place] >= 0:
            place += 1
        places[ranks[i], place] = experts[i]


@compiled()
def _quotas(totals: Any, divided: Any, expert_to_first: Any, units: Any, quotas: Any) -> None:
    for i in range(len(divided)):
        first, end = expert_to_first[divided[i]], expert_to_first[divided[i] + 1]
        left = totals[i]
        for owner in range(first, end):
            quotas[owner] = totals[i] * units[owner] // _UNITS
            left -= quotas[owner]
        remainders = totals[i] * units[first:end] % _UNITS
        for _ in range(left):
            best = 0
            for j in range(1, end - first):
                if remainders[j] > remainders[best]:
                    best = j
            quotas[first + best] += 1
            remainders[best] = -1


@compiled()
def _divide_rows(
    counts: Any, divided: Any, expert_to_first: Any, to_rank: Any, to_node: Any, rank: int, left: Any, bounds: Any
) -> None:
    """Fill ``bounds``; ``left`` are the quotas, which are used up."""
    for i in range(len(divided)):
        first, end = expert_to_first[divided[i]], expert_to_first[divided[i] + 1]
        rows = counts[:, i].copy()
        for nearness in range(3):  # this rank, this node, all
            for src in range(len(rows)):
                for owner in range(first, end):
                    if nearness == 0 and to_rank[owner] != src:
                        continue
                    if nearness == 1 and to_node[to_rank[owner]] != to_node[src]:
                        continue
                    taken = min(rows[src], left[owner])
                    rows[src] -= taken
                    left[owner] -= taken
                    if src == rank:
                        bounds[owner] += taken
        for owner in range(first + 1, end):
            bounds[owner] += bounds[owner - 1]


def warm_up_owners() -> None:
    """Compile ``divide_rows``, or read it from the disk cache."""
    placement = ExpertPlacement.replicated([[0], [0]], [[0.5], [0.5]])
    OwnerTables.of(placement, 0, Topology((0, 0))).divide_rows(np.zeros((2, 1), np.int64))

"""Placements of experts for the loads to be expected: homes, copies of busy experts, and the share of each.

Shapes: E experts, R ranks, P places on each rank, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusco.core.balance import Balance
from fusco.core.compiled import compiled
from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray
from fusco.placement.batch import Givers, plan_batch, plan_copies
from fusco.placement.moves import plan_moves

_TOTAL = 1 << 40  # what loads are scaled to, so that sums of integers are exact


@dataclass(frozen=True)
class PlannedPlacement:
    """Experts in places, and how many of an expert's rows each of its places should compute.

    Attributes:
        physical_to_logical: int64 (R, P), the expert in each place, -1 for none. No rank has an expert twice.
        shares: float64 (R, P), the share of the expert's rows; those of an expert sum to 1, empty places have 0.
        loads: float64 (R,), the planned loads of the ranks, in the unit of the loads given.
        num_moves: places whose expert was not on that rank before.
    """

    physical_to_logical: IntArray
    shares: npt.NDArray[np.float64]
    loads: npt.NDArray[np.float64]
    num_moves: int

    @cached_property
    def busiest_over_mean(self) -> float:
        """Load of the busiest rank over the mean; 1 without loads."""
        return float(self.loads.max() / mean) if (mean := self.loads.mean()) else 1.0


def plan_placement(
    loads: npt.ArrayLike,
    num_ranks: int,
    places_per_rank: int,
    *,
    ranks_per_node: int | None = None,
    current: npt.ArrayLike | None = None,
    max_moves: int | None = None,
    tolerance: float = 0.01,
) -> PlannedPlacement:
    """Plan where experts should be for loads such as those of the last thousand steps.

    Step 1: homes. The busiest expert first, each to the least loaded rank that has it, or without ``current`` to the
    least loaded rank that has fewer than its share of experts. Step 2: copies, as ``plan_batch`` plans them; those that
    exist come first. Where that exceeds the tolerance and moves are not limited: both steps without ``current``, or
    copies in all places with equal shares, as EPLB plans them, if that is better; with ``current``, by the tolerance.
    Step 3, if loads are given by node: places that are left get the experts that their node asks other nodes for most.

    Args:
        loads: rows (E,) of each expert, in any unit; or (N, E), of the tokens of each node.
        num_ranks: R.
        places_per_rank: P; ``R * P`` must be at least E.
        ranks_per_node: consecutive ranks that reach each other's memory; by default all.
        current: (R, P), the placement of today, -1 for empty places.
        max_moves: the most places that may get an expert that their rank lacks. Needs ``current``.
        tolerance: no more experts move once the busiest rank has at most this share above the mean.

    Raises:
        ValueError: if shapes or values are not as above.

    Expert 0 has half of all rows, so rank 1 takes a share of it, until rank 0 has 1 % more than the mean:

    >>> plan = plan_placement([60, 30, 20, 10], num_ranks=2, places_per_rank=3)
    >>> plan.physical_to_logical.tolist(), plan.shares.round(2).tolist()
    ([[0, 3, -1], [0, 1, 2]], [[0.84, 1.0, 0.0], [0.16, 1.0, 1.0]])
    >>> plan.loads.round(1).tolist(), plan.num_moves
    ([60.6, 59.4], 0)
    """
    by_node = np.atleast_2d(np.asarray(loads, dtype=np.float64))
    num_experts, total = by_node.shape[1], float(by_node.sum())
    ranks_per_node = num_ranks if ranks_per_node is None else ranks_per_node
    _check(by_node, num_ranks, places_per_rank, ranks_per_node, current, max_moves)
    scale = _TOTAL / total if total else 0.0
    rows = by_node * scale
    known, had = np.full((num_ranks, places_per_rank), -1), np.zeros((num_experts, num_ranks), dtype=np.bool_)
    if current is not None:
        known = np.array(current, dtype=np.int64)
        had[known[known >= 0], np.nonzero(known >= 0)[0]] = True
    limit = known.size if max_moves is None else max_moves
    shape = _Shape(places_per_rank, ranks_per_node, int(rows.sum() * (1 + tolerance) / num_ranks) + 1)
    placed = _place(rows, had, shape, limit)
    if max_moves is None and _busiest(placed) > shape.aim:
        anew = [_divide_evenly(rows.sum(axis=0).astype(np.int64), num_ranks, places_per_rank)]
        anew += [] if current is None else [_place(rows, np.zeros_like(had), shape, limit)]
        best, least_gain = min(anew, key=_busiest), 0.0 if current is None else tolerance
        placed = best if _busiest(best) * (1 + least_gain) < _busiest(placed) else placed
    if len(rows) > 1:
        _bring_closer(placed, had, rows, shape, limit - int(((placed >= 0) & ~had).sum()))
    places, shares = np.full_like(known, -1), np.zeros(known.shape)
    _assemble(placed, known, places)
    _share(placed, places, shares)
    planned = np.maximum(placed, 0).sum(axis=0) / scale if scale else np.zeros(num_ranks)
    return PlannedPlacement(places, shares, planned, int(((placed >= 0) & ~had).sum()) if had.any() else 0)


class _Shape(NamedTuple):
    places_per_rank: int
    ranks_per_node: int
    aim: int  # rows of the busiest rank


def _check(
    by_node: npt.NDArray[np.float64],
    num_ranks: int,
    places_per_rank: int,
    ranks_per_node: int,
    current: npt.ArrayLike | None,
    max_moves: int | None,
) -> None:
    check_integer("num_ranks", num_ranks, least=1)
    check_integer("places_per_rank", places_per_rank, least=1)
    check_integer("ranks_per_node", ranks_per_node, least=1, most=num_ranks)
    num_nodes, num_experts = by_node.shape
    if by_node.ndim != 2 or num_nodes not in (1, -(-num_ranks // ranks_per_node)):
        raise ValueError(f"loads have shape {by_node.shape}, not (experts,) or (nodes, experts)")
    if not np.isfinite(by_node).all() or by_node.min(initial=0) < 0:
        raise ValueError(f"loads must be finite and at least 0, got {by_node.min()} to {by_node.max()}")
    if num_experts > num_ranks * places_per_rank:
        raise ValueError(f"{num_experts} experts need as many places, got {num_ranks} x {places_per_rank}")
    if max_moves is not None:
        check_integer("max_moves", max_moves, least=0)
        if current is None:
            raise ValueError(f"max_moves={max_moves} needs the current placement")
    if current is not None:
        known = np.asarray(current, dtype=np.int64)
        if known.shape != (num_ranks, places_per_rank):
            raise ValueError(f"current has shape {known.shape}, not ({num_ranks}, {places_per_rank})")
        if missing := sorted(set(range(num_experts)) - set(known.ravel().tolist())):
            raise ValueError(f"current has no place for expert(s) {missing}")
        if known.max() >= num_experts:
            raise ValueError(f"current has expert {known.max()}, but loads are of {num_experts}")


@compiled()
def _place(rows: Any, had: Any, shape: Any, max_new: int) -> Any:
    """Return the rows (E, R) of each expert on each rank, -1 where it is not: homes, and copies where they are busy."""
    num_experts, num_ranks = had.shape
    counts = rows.sum(axis=0).astype(np.int64)
    homes = _homes(counts, had, rows, shape.places_per_rank, shape.ranks_per_node)
    loads, first = np.zeros(num_ranks, np.int64), np.zeros(num_ranks + 1, np.int64)
    placed = np.full(had.shape, -1)
    for expert in range(num_experts):
        loads[homes[expert]] += counts[expert]
        first[homes[expert] + 1] += 1
        placed[expert, homes[expert]] = counts[expert]
    places = shape.places_per_rank - first[1:]
    order, first = np.argsort(homes, kind="mergesort"), first.cumsum()
    copies = np.empty((places.sum(), 3), dtype=np.int64)
    has = had if had.any() else had[:0]
    givers = Givers(counts, order, first, loads, places, has, shape.ranks_per_node, max_new)
    num, _ = plan_copies(givers, shape.aim, 0.0, copies, np.empty_like(loads))
    for expert, rank, moved in copies[:num]:
        placed[expert, homes[expert]] -= moved
        placed[expert, rank] = moved
    return placed


@compiled()
def _divide_evenly(counts: Any, num_ranks: int, places_per_rank: int) -> Any:
    """Return rows as ``_place`` does, for as many copies as places, those of an expert with equal rows.

    As in EPLB: a further copy is one of the expert with most rows for each copy; the largest first, a copy is put on
    the least loaded rank. Two of an expert on a rank are one with the rows of both.
    """
    numbers, placed = np.ones_like(counts), np.full((len(counts), num_ranks), -1)
    loads, left = np.zeros(num_ranks, np.int64), np.full(num_ranks, places_per_rank)
    for _ in range(num_ranks * places_per_rank - len(counts)):
        numbers[(counts / numbers).argmax()] += 1
    for expert in np.argsort(-(counts / numbers), kind="mergesort"):
        for i in range(numbers[expert]):
            best, rows = -1, (counts[expert] + i) // numbers[expert]
            for rank in range(num_ranks):
                if left[rank] and (best < 0 or loads[rank] < loads[best]):
                    best = rank
            placed[expert, best] = max(placed[expert, best], 0) + rows
            loads[best] += rows
            left[best] -= 1
    return placed


@compiled()
def _homes(counts: Any, had: Any, by_node: Any, places_per_rank: int, ranks_per_node: int) -> Any:
    """Return the home of each expert; of ranks that are equally loaded, on the node that wants it most."""
    num_experts, num_ranks = had.shape
    most = min(places_per_rank, -(-num_experts // num_ranks))
    loads, numbers = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    homes = np.empty(num_experts, np.int64)
    for expert in np.argsort(-counts, kind="mergesort"):
        is_known, best = had[expert].any(), -1
        for rank in range(num_ranks):
            if had[expert, rank] if is_known else numbers[rank] < most:
                is_better = best < 0 or loads[rank] < loads[best]
                if best >= 0 and loads[rank] == loads[best] and len(by_node) > 1:
                    is_better = by_node[rank // ranks_per_node, expert] > by_node[best // ranks_per_node, expert]
                if is_better:
                    best = rank
        homes[expert] = best
        loads[best] += counts[expert]
        numbers[best] += 1
    return homes


def _busiest(placed: IntArray) -> int:
    return int(np.maximum(placed, 0).sum(axis=0).max())


def _bring_closer(
    placed: IntArray, had: npt.NDArray[np.bool_], rows: npt.NDArray[np.float64], shape: _Shape, max_new: int
) -> None:
    """Copy experts into places that are left, for tokens of a node whose expert is on other nodes only."""
    node_of = np.arange(placed.shape[1]) // shape.ranks_per_node
    loads = np.maximum(placed, 0).sum(axis=0)
    for rank in np.argsort(loads, kind="stable"):
        local = node_of == node_of[rank]
        while (placed[:, rank] >= 0).sum() < shape.places_per_rank:
            wanted = np.where((placed[:, local] >= 0).any(axis=1), 0, rows[node_of[rank]].astype(np.int64))
            wanted[~had[:, rank]] *= max_new > 0
            expert = int(wanted.argmax())
            owner = int(np.argmax(np.where(placed[expert] >= 0, loads, -1)))
            moved = min(int(wanted[expert]), shape.aim - int(loads[rank]), int(placed[expert, owner]))
            if moved <= 0:
                break
            placed[expert, owner] -= moved
            placed[expert, rank] = moved
            loads[owner] -= moved
            loads[rank] += moved
            max_new -= not had[expert, rank]


@compiled()
def _assemble(placed: Any, known: Any, places: Any) -> None:
    """Write experts into places: those that stay first, where they are; then new ones; unused old ones where left."""
    num_experts, num_ranks = placed.shape
    for rank in range(num_ranks):
        is_placed, place = np.zeros(num_experts, np.bool_), 0
        for i, expert in enumerate(known[rank]):
            if expert >= 0 and placed[expert, rank] >= 0:
                places[rank, i], is_placed[expert] = expert, True
        for expert in range(num_experts):
            if placed[expert, rank] >= 0 and not is_placed[expert]:
                while places[rank, place] >= 0:
                    place += 1
                places[rank, place] = expert
        for i in range(places.shape[1]):
            if places[rank, i] < 0:
                places[rank, i] = known[rank, i]


@compiled()
def _share(placed: Any, places: Any, shares: Any) -> None:
    """Write the share of its expert's rows of each place; an expert without rows has its home."""
    num_experts, num_ranks = placed.shape
    totals = np.zeros(num_experts, np.int64)
    for rank in range(num_ranks):
        for expert in range(num_experts):
            totals[expert] += max(placed[expert, rank], 0)
    for rank in range(num_ranks):
        for i, expert in enumerate(places[rank]):
            if expert >= 0 and placed[expert, rank] >= 0:
                shares[rank, i] = placed[expert, rank] / totals[expert] if totals[expert] else 1.0


def warm_up_placement() -> None:
    """Compile all plans, once on each machine."""
    plan_placement([3.0, 1.0], num_ranks=2, places_per_rank=2, current=[[0, 1], [1, 0]])
    _divide_evenly(np.array([3, 1]), 2, 1)
    plan_batch([3, 1], [0, 1], num_ranks=2, balance=Balance(spare_places=1))
    plan_moves([[0], [1]], [[1], [0]])

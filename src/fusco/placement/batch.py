"""The plan of one batch: experts that are copied to spare places, and the rows that each copy computes.

Rows of an expert go to its home, and what is too much there to copies on other ranks. Every rank knows the rows of all
experts before any row moves, so every rank computes the same plan.

Shapes: E experts, R ranks, C copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusco.core.balance import (
    FIRST_GAP,
    MOST_TRIES,
    NUM_CAPS,
    NUM_RULES,
    NUM_TRIES,
    PRECISION,
    Balance,
    BatchPlan,
    aim_of,
    limit_of,
)
from fusco.core.compiled import compiled
from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray

_ANY = 2  # rule that takes any giver or taker


def plan_batch(
    rows: npt.ArrayLike,
    expert_to_rank: npt.ArrayLike,
    num_ranks: int,
    balance: Balance,
    ranks_per_node: int | None = None,
) -> BatchPlan:
    """Plan which experts are copied where, from the rows of each expert.

    The busiest rank gives rows of its largest expert to the rank of least room that takes the whole surplus, on its own
    node if there is one; else as many as possible to the rank of most room; until no rank exceeds a cap. Where places
    do not suffice, ranks give in the opposite order, or always to the rank of most room, or as pseudorandom numbers say
    (the same on all ranks). Of several caps, the plan keeps the one with the fewest rows on the busiest rank, plus
    ``rows_per_copy`` for each copy that a rank sends or receives (the most of any rank).

    Args:
        rows: (E,), rows of all ranks for each expert.
        expert_to_rank: (E,), the home of each expert.
        num_ranks: R.
        balance: spare places and costs.
        ranks_per_node: consecutive ranks that reach each other's memory; by default all.

    Raises:
        ValueError: if shapes, counts or ranks are not as above.

    Two ranks of two experts. Half of the surplus of rank 0 is all that rank 1 must take:

    >>> plan = plan_batch([50, 30, 10, 10], [0, 0, 1, 1], num_ranks=2, balance=Balance(spare_places=1, tolerance=0))
    >>> plan.experts.tolist(), plan.ranks.tolist(), plan.rows.tolist(), plan.loads.tolist()
    ([0], [1], [30], [50, 50])
    """
    counts, homes = np.asarray(rows, dtype=np.int64), np.asarray(expert_to_rank, dtype=np.int64)
    check_integer("num_ranks", num_ranks, least=1)
    ranks_per_node = num_ranks if ranks_per_node is None else ranks_per_node
    check_integer("ranks_per_node", ranks_per_node, least=1, most=num_ranks)
    if counts.ndim != 1 or counts.shape != homes.shape:
        raise ValueError(f"rows and expert_to_rank need one entry per expert, got {counts.shape} and {homes.shape}")
    copies = np.empty((num_ranks * balance.spare_places, 3), dtype=np.int64)
    before, loads = np.empty((2, num_ranks), dtype=np.int64)
    costs = (float(balance.tolerance), float(balance.rows_per_copy))
    wrong, aim, num_copies, is_aim_held = _plan(counts, homes, ranks_per_node, costs, copies, before, loads)
    if wrong >= 0 and counts[wrong] < 0:
        raise ValueError(f"expert {wrong} has {counts[wrong]} rows")
    if wrong >= 0:
        raise ValueError(f"expert {wrong} is on rank {homes[wrong]}, but there are {num_ranks} ranks")
    experts, ranks, moved = copies[:num_copies].T
    return BatchPlan(experts, ranks, moved, loads, before, limit_of(loads, aim, is_aim_held=is_aim_held), counts)


class Givers(NamedTuple):
    """What is known before experts are copied."""

    rows: IntArray  # (E,)
    order: IntArray  # (E,), experts by home; those of rank r are [first[r], first[r + 1])
    first: IntArray  # (R + 1,)
    loads: IntArray  # (R,), without copies
    places: IntArray  # (R,), for copies, those that exist included
    has: npt.NDArray[np.bool_]  # (E, R), the copies that exist; (0, R) if there are none
    ranks_per_node: int
    max_new: int  # copies beside those that exist


@compiled()
def _plan(
    rows: Any, homes: Any, ranks_per_node: int, costs: tuple[float, float], copies: Any, before: Any, loads: Any
) -> tuple[int, int, int, bool]:
    """Plan copies, and fill ``before``; return an expert with a wrong entry or -1, the aim, and as ``plan_copies``."""
    num_ranks, (tolerance, rows_per_copy) = len(before), costs
    first, order = np.zeros(num_ranks + 1, np.int64), np.empty_like(homes)
    before[:] = 0
    for expert in range(len(rows)):
        if rows[expert] < 0 or not 0 <= homes[expert] < num_ranks:
            return expert, 0, 0, False
        before[homes[expert]] += rows[expert]
        first[homes[expert] + 1] += 1
    first[:] = np.cumsum(first)
    filled = first.copy()
    for expert in range(len(rows)):
        order[filled[homes[expert]]] = expert
        filled[homes[expert]] += 1
    places, has = np.full(num_ranks, len(copies) // num_ranks), np.zeros((0, num_ranks), np.bool_)
    givers = Givers(rows, order, first, before, places, has, ranks_per_node, len(copies))
    aim = aim_of(before.sum(), num_ranks, tolerance)
    num_copies, is_aim_held = plan_copies(givers, aim, rows_per_copy, copies, loads)
    return -1, aim, num_copies, is_aim_held


@compiled()
def plan_copies(givers: Any, aim: int, rows_per_copy: float, best: Any, loads: Any) -> tuple[int, bool]:
    """Write the cheapest plan into ``best`` (C, 3) and ``loads``; return its C, and whether the aim can be held."""
    most, copies, held_loads = givers.loads.max(), np.empty_like(best), np.empty_like(loads)
    loads[:] = givers.loads
    num_best, least_cost, is_aim_held = 0, float(most), most <= aim
    cap, failed, held = aim, aim, most  # the greatest cap that no way could hold, the least that one could
    gap, all_ways = max(1, aim // FIRST_GAP), NUM_RULES + min(MOST_TRIES, NUM_TRIES // len(loads) ** 2)
    for i in range(NUM_CAPS):
        if cap >= most or cap <= 0:
            break
        num_ways = all_ways if i == 0 or held < most else 1
        has_places = _has_places(givers, cap)
        num = _hold(givers, cap, num_ways, copies, held_loads) if has_places else -1
        if num < 0 and (num_ways > 1 or not has_places):
            failed = cap
        if num >= 0:
            held, is_aim_held = min(held, cap), is_aim_held or cap == aim
            cost = held_loads.max() + (rows_per_copy * _most_copies(givers, copies[:num]) if rows_per_copy else 0.0)
            if cost < least_cost:
                least_cost, num_best = cost, num
                best[:num], loads[:] = copies[:num], held_loads
        if rows_per_copy == 0 and held < most:
            if held <= failed + max(1, aim // PRECISION):
                break
            cap = (held + failed) // 2
        else:  # geometrically from the aim to the most, in integers, which no device rounds
            cap = aim + gap
            gap *= 2
    return num_best, is_aim_held


@compiled()
def _has_places(givers: Any, cap: int) -> Any:
    """Return False if ranks with room have too few places, even if each could take as much as the one of most room."""
    most_room, num_left, left = cap - givers.loads.min(), givers.places[givers.loads < cap].sum(), givers.rows.copy()
    for giver in range(len(givers.loads)):
        surplus = givers.loads[giver] - cap
        while surplus > 0 and num_left >= 0:
            expert = _largest(givers, giver, left)
            moved = min(left[expert], most_room)
            if moved <= 0:
                return False
            left[expert] -= moved
            surplus -= moved
            num_left -= 1
    return num_left >= 0


@compiled()
def _hold(givers: Any, cap: int, num_ways: int, copies: Any, loads: Any) -> Any:
    """Copy experts until no rank has more rows than ``cap``; return how many, or -1 if places do not suffice."""
    left, places, slack = givers.rows.copy(), givers.places.copy(), np.int64(0)
    for rank in range(len(loads)):  # the room that may stay empty: a rank without places fills no more of its own
        loads[rank] = givers.loads[rank]
        slack += cap - loads[rank] if places[rank] > 0 else min(cap - loads[rank], 0)
    for way in range(num_ways if slack >= 0 else 0):
        num = _hold_in_one_way(givers, cap, way, slack, copies, loads, left, places)
        if num >= 0:
            return num
        for i in range(-1 - num):  # as before: most ways end after a few copies
            left[copies[i, 0]] += copies[i, 2]
        for rank in range(len(loads)):
            loads[rank], places[rank] = givers.loads[rank], givers.places[rank]
    return -1


@compiled()
def _hold_in_one_way(
    givers: Any, cap: int, way: int, slack: Any, copies: Any, loads: Any, left: Any, places: Any
) -> int:
    """Try ``_hold``; return the number of copies, or if places do not suffice, -1 minus it.

    Ways 0 to 3 follow one rule for givers and one for takers; others draw both at every step.
    """
    num, num_new, giver_rule, taker_rule, seed = 0, 0, way // 2, way % 2, way
    while slack >= 0:
        if way >= NUM_RULES:
            seed = _next(seed)
            giver_rule, taker_rule = (seed >> 16) % 3, (seed >> 20) % 3
        giver = _giver(loads, cap, giver_rule, seed)
        if giver < 0:
            return num
        expert, taker = -1, -1
        if len(givers.has):
            expert, taker = _known_copy(givers, giver, left, loads, places, cap)
        if taker < 0:
            num_new += 1
            expert = _largest(givers, giver, left)
            if taker_rule == _ANY:
                taker = _some(loads, places, cap, -1, _next(seed))
            else:
                wanted = min(loads[giver] - cap, left[expert]) if taker_rule == 0 else cap
                taker = _taker(loads, places, cap, giver, givers.ranks_per_node, wanted)
        moved = min(loads[giver] - cap, left[expert], cap - loads[taker])
        if taker < 0 or moved <= 0 or num_new > givers.max_new:
            break
        copies[num, 0], copies[num, 1], copies[num, 2] = expert, taker, moved
        num += 1
        left[expert] -= moved
        loads[giver] -= moved
        loads[taker] += moved
        places[taker] -= 1
        if places[taker] == 0:
            slack -= cap - loads[taker]
    return -1 - num


@compiled()
def _next(seed: Any) -> Any:
    """Return the next of the pseudorandom numbers of C's ``rand``, 31 bits: the same on all ranks."""
    return (seed * 1103515245 + 12345) % 2147483648


@compiled()
def _giver(loads: Any, cap: int, rule: int, seed: Any) -> Any:
    """Return a rank with more rows than the cap: that of most (rule 0), of least (1), or any; -1 if there is none."""
    if rule == _ANY:
        return _some(loads, loads, cap, 1, seed)
    giver = -1
    for rank in range(len(loads)):
        if loads[rank] > cap and (giver < 0 or (loads[rank] < loads[giver] if rule else loads[rank] > loads[giver])):
            giver = rank
    return giver


@compiled()
def _some(loads: Any, places: Any, cap: int, sign: int, seed: Any) -> Any:
    """Return any rank with places whose load is above the cap (sign 1) or below (-1); -1: none."""
    number = 0
    for rank in range(len(loads)):
        number += (loads[rank] - cap) * sign > 0 and places[rank] > 0
    left = (seed >> 12) % max(number, 1)
    for rank in range(len(loads)):
        if (loads[rank] - cap) * sign > 0 and places[rank] > 0:
            if left == 0:
                return rank
            left -= 1
    return -1


@compiled()
def _largest(givers: Any, rank: int, left: Any) -> Any:
    """Return the expert of a rank with the most rows left, -1 of none."""
    largest = np.int64(-1)
    for i in range(givers.first[rank], givers.first[rank + 1]):
        expert = givers.order[i]
        if largest < 0 or left[expert] > left[largest]:
            largest = expert
    return largest


@compiled()
def _known_copy(givers: Any, giver: int, left: Any, loads: Any, places: Any, cap: int) -> tuple[int, int]:
    """Return the expert and rank of the copy, of those that exist, which takes the most rows; -1 twice if none does."""
    most, best, taker = np.int64(0), np.int64(-1), -1
    for i in range(givers.first[giver], givers.first[giver + 1]):
        expert = givers.order[i]
        for rank in range(len(loads)):
            takes = min(left[expert], cap - loads[rank])
            if givers.has[expert, rank] and places[rank] > 0 and takes > most:
                most, best, taker = takes, expert, rank
    return best, taker


@compiled()
def _taker(loads: Any, places: Any, cap: int, giver: int, ranks_per_node: int, wanted: int) -> int:
    """Return the rank of least room for ``wanted`` rows, on this node if there is one; else that of most; -1: none."""
    best, largest, least = -1, -1, np.int64(0)
    first = giver // ranks_per_node * ranks_per_node  # of the giver's node
    for rank in range(len(loads)):
        room = cap - loads[rank]
        if room <= 0 or places[rank] == 0:
            continue
        if largest < 0 or room > cap - loads[largest]:
            largest = rank
        if room >= wanted:
            measure = room if first <= rank < first + ranks_per_node else room + cap
            if best < 0 or measure < least:
                best, least = rank, measure
    return best if best >= 0 else largest


@compiled()
def _most_copies(givers: Any, copies: Any) -> Any:
    """Return the most copies that a rank sends or receives."""
    home = np.empty_like(givers.rows)
    for rank in range(len(givers.loads)):
        home[givers.order[givers.first[rank] : givers.first[rank + 1]]] = rank
    sent, received = np.zeros_like(givers.loads), np.zeros_like(givers.loads)
    for i in range(len(copies)):
        sent[home[copies[i, 0]]] += 1
        received[copies[i, 1]] += 1
    return max(sent.max(), received.max())

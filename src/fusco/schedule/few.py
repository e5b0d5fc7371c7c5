"""Few stages: within 2 % of the largest row or column sum, at a small multiple of the number of nodes.

The rule is fusco's; FAST has only the exact decomposition. A stage may be longer than some of its entries: the nodes
of these entries wait for the difference. A node may wait in total for the budget (102 % of the lower bound) minus what
it still sends or receives. No stage spends more of that than is left, so the budget holds for any matrix. The reach of
a pair is its entry plus what both of its nodes may wait: the longest stage that it can be part of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.schedule.exact import DST_OF, NUM_ROWS, augment, clear, complete, decompose_exactly, mark, part, sum_up

_MAX_BYTES = np.iinfo(np.int64).max
_BUDGET_DIVISOR = 50  # the 2 %
MAX_STAGES_PER_NODE = 3
_MAX_NODES_FOR_EXACT = 6  # up to here, the exact decomposition may have fewer stages

# (planned, common_share, own_share). In a stage, a node may wait for ``common_share / stages left`` of what every node
# may still wait, with ``planned`` stages per node in total; and of what it may wait beyond that, for ``own_share``
# times the part of the budget that the previous stage took. A dozen rules were tried on nine families of matrices: the
# first takes fewest stages; the others are for matrices where it needs too many (one in some hundreds, below 9 nodes).
_RULES = ((2.5, 2.0, 2.0), (2.5, 2.0, 1.5), (2.5, 3.0, 1.5), (2.0, 2.0, 3.0))


@compiled()
def budget_bytes(lower_bound: int) -> int:
    """Return the longest schedule allowed: 102 % of the lower bound, rounded down, within int64."""
    return min(lower_bound, _MAX_BYTES - lower_bound // _BUDGET_DIVISOR) + lower_bound // _BUDGET_DIVISOR


@compiled()
def _serve(rest: Any, sums: Any, match: Any, length: int, dst_node: Any, num_bytes: Any) -> int:
    """Take one stage of at most ``length``; returns its length."""
    num_nodes = rest.shape[0]
    longest = 0
    for src in range(num_nodes):
        longest = max(longest, rest[src, match[DST_OF, src]])
    length = min(length, longest)
    for src in range(num_nodes):
        dst = match[DST_OF, src]
        size = min(length, rest[src, dst])
        dst_node[src] = dst if size > 0 else -1
        num_bytes[src] = size
        rest[src, dst] -= size
        sums[0, src] -= size
        sums[1, dst] -= size
    return length


@compiled()
def _plan_stage(rest: Any, sums: Any, budget: int, shares: Any, reach: Any, adjacent: Any, matches: Any) -> int:
    """Return the length of the longest stage that the shares allow; its matching is in ``matches[0]``."""
    waits = np.empty((2, rest.shape[0]), np.int64)
    limit_waiting(sums, budget, shares, waits)
    longest = find_reach(rest, waits, reach)
    length = find_longest(reach, longest, adjacent[0], matches[0], matches[1])
    match_finishing_first(rest, reach, length, adjacent[0], adjacent[1], matches[0])
    return length


@compiled()
def _follow(rest: Any, sums: Any, rule: Any, dst_node: Any, num_bytes: Any, duration_bytes: Any) -> int:
    """Take stages off ``rest`` by one rule; returns their number, -1 if there is no room for all of them."""
    planned, common_share, own_share = rule
    num_nodes = rest.shape[0]
    left = sums.max()
    budget = budget_bytes(left)
    reach = np.empty((num_nodes, num_nodes), np.int64)
    adjacent = np.empty((2, num_nodes, (num_nodes + 63) >> 6), np.int64)
    matches = np.empty((2, NUM_ROWS, num_nodes), np.int64)
    shares = np.empty(2, np.float64)
    clear(matches[0])
    stage = 0
    previous = 0.0
    while left > 0:
        if stage == len(duration_bytes):
            return -1
        stages_left = max(1.0, planned * num_nodes - stage)
        shares[0] = common_share / stages_left
        shares[1] = own_share * max(previous / budget, 1.0 / stages_left)
        length = _plan_stage(rest, sums, budget, shares, reach, adjacent, matches)
        length = _serve(rest, sums, matches[0], length, dst_node[stage], num_bytes[stage])
        duration_bytes[stage] = length
        previous = float(length)
        budget -= length
        left = sums.max()
        stage += 1
    return stage


@compiled()
def _shift(node_bytes: Any, budget: int, dst_node: Any, num_bytes: Any, duration_bytes: Any) -> int:
    """Make stages of shifted diagonals, as ``spread_out``; returns their number, -1 if they exceed the budget."""
    num_nodes = node_bytes.shape[0]
    stage = 0
    for shift in range(1, num_nodes):
        length = 0
        for src in range(num_nodes):
            dst = src + shift - (num_nodes if src + shift >= num_nodes else 0)
            size = node_bytes[src, dst]
            dst_node[stage, src] = dst if size > 0 else -1
            num_bytes[stage, src] = size
            length = max(length, size)
        if length > budget:
            return -1
        budget -= length
        duration_bytes[stage] = length
        stage += 1 if length > 0 else 0
    return stage


@compiled()
def decompose_in_few(node_bytes: Any) -> Any:
    """Return ``dst_node``, ``num_bytes`` and ``duration_bytes`` of ``Stages``; ValueError for an invalid matrix.

    Every stage of the int64 matrix is the longest in which no node waits beyond its share. Of the matchings that allow
    it, one that uses up many entries is taken. The first rule that needs at most three stages per node wins. If none
    does, which is not known of any matrix, the result is the exact decomposition. There are two shortcuts. Shifted
    diagonals (SpreadOut) are used where they are within the budget, as for equal entries: at most one stage for each
    other node. And up to six nodes, the exact stages are used unless there are more of them.
    """
    num_nodes = node_bytes.shape[0]
    limit = MAX_STAGES_PER_NODE * num_nodes
    sums, rest = np.empty((2, num_nodes), np.int64), np.empty((num_nodes, num_nodes), np.int64)
    dst_node = np.empty((limit, num_nodes), np.int64)
    num_bytes = np.empty((limit, num_nodes), np.int64)
    duration_bytes = np.empty(limit, np.int64)
    lower_bound = sum_up(node_bytes, sums)
    if lower_bound < 0:
        raise ValueError
    num_stages = _shift(node_bytes, budget_bytes(lower_bound), dst_node, num_bytes, duration_bytes)
    if num_stages >= 0:
        return dst_node[:num_stages], num_bytes[:num_stages], duration_bytes[:num_stages]
    for rule in _RULES:
        sum_up(node_bytes, sums)
        rest[:] = node_bytes
        for node in range(num_nodes):
            rest[node, node] = 0
        num_stages = _follow(rest, sums, rule, dst_node, num_bytes, duration_bytes)
        if num_stages >= 0:
            break
    if num_stages < 0 or num_nodes <= _MAX_NODES_FOR_EXACT:
        exact = decompose_exactly(node_bytes)
        if num_stages < 0 or len(exact[2]) <= num_stages:
            return exact
    return dst_node[:num_stages], num_bytes[:num_stages], duration_bytes[:num_stages]


@compiled()
def _share(waiting: int, share: float) -> int:
    """Return a share of what a node may still wait, at least one byte if there is any."""
    return waiting if share >= 1.0 else min(waiting, int(share * waiting) + 1)


@compiled()
def limit_waiting(sums: Any, budget: int, shares: Any, waits: Any) -> None:
    """Limit the waiting in a stage: ``shares[0]`` of what all nodes may wait, ``shares[1]`` of a node's excess."""
    num_nodes = sums.shape[1]
    common = budget
    for side in range(2):
        for node in range(num_nodes):
            common = min(common, budget - sums[side, node])
    of_common = _share(common, shares[0])
    for side in range(2):
        for node in range(num_nodes):
            waits[side, node] = of_common + _share(budget - sums[side, node] - common, shares[1])


@compiled()
def find_reach(rest: Any, waits: Any, reach: Any) -> int:
    """Compute the reach of all pairs; returns an upper bound of any stage's length."""
    num_nodes = rest.shape[0]
    largest = 0
    limit = _MAX_BYTES
    highest = np.zeros(num_nodes, np.int64)
    for src in range(num_nodes):
        wait = waits[0, src]
        row_highest = 0
        for dst in range(num_nodes):
            size = rest[src, dst]
            length = size + min(wait, waits[1, dst])
            reach[src, dst] = length
            largest = max(largest, size)
            row_highest = max(row_highest, length)
            highest[dst] = max(highest[dst], length)
        limit = min(limit, row_highest)
    for dst in range(num_nodes):
        limit = min(limit, highest[dst])
    return min(limit, largest)


@compiled()
def _try_length(reach: Any, length: int, adjacent: Any, match: Any) -> int:
    """Repair the matching for a stage of ``length``; returns the length that it then allows, -1 if there is none."""
    num_nodes = reach.shape[0]
    mark(reach, length, _MAX_BYTES, adjacent)
    for src in range(num_nodes):
        dst = match[DST_OF, src]
        if dst >= 0 and reach[src, dst] < length:
            part(match, src)
    if not complete(adjacent, match):
        return -1
    longest = _MAX_BYTES
    for src in range(num_nodes):
        longest = min(longest, reach[src, match[DST_OF, src]])
    return longest


@compiled()
def find_longest(reach: Any, limit: int, adjacent: Any, match: Any, kept: Any) -> int:
    """Find by bisection the longest stage, within 1/64, that some matching allows."""
    length = min(limit, _try_length(reach, 1, adjacent, match))
    kept[:] = match
    tried = limit
    while length < tried:
        reached = _try_length(reach, tried, adjacent, match)
        if reached >= 0:
            length = min(limit, reached)
            kept[:] = match
        else:
            limit = tried - 1
            match[:] = kept
        if limit - length <= limit >> 6:
            break
        tried = limit - ((limit - length) >> 1)
    return length


@compiled()
def match_finishing_first(rest: Any, reach: Any, length: int, adjacent: Any, finishing: Any, match: Any) -> None:
    """Make a perfect matching for a stage of ``length`` that uses up many entries."""
    num_nodes = rest.shape[0]
    mark(reach, length, _MAX_BYTES, adjacent)
    clear(match)
    mark(rest, 1, length, finishing)
    for src in range(num_nodes):
        for word in range(adjacent.shape[1]):
            finishing[src, word] &= adjacent[src, word]
        augment(finishing, match, src)
    complete(adjacent, match)

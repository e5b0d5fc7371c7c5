"""The longest stage in which nodes wait no longer than they may, and its matching.

Compiled helpers of ``few``. The reach of a pair is its entry plus what both of its nodes may wait: the longest stage
that it can be part of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.schedule.matching import DST_OF, augment, clear, complete, mark, part

_MAX_BYTES = np.iinfo(np.int64).max


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

"""Birkhoff's decomposition: stages whose lengths sum to the largest row or column sum.

Source: FAST section 4.2 and 4.4, after G. Birkhoff (1946); the bound on the number of stages is that of Johnson,
Dulmage and Mendelsohn (1960). The state kept between stages, and its repair, are fusco's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.schedule.matching import DST_OF, NUM_ROWS, clear, complete, mark, part

_MAX_BYTES = np.iinfo(np.int64).max


@compiled()
def sum_up(node_bytes: Any, src_dst_sums: Any) -> int:
    """Write the bytes that each node sends and receives to (2, num_nodes), without the diagonal.

    Returns the largest sum, or -1 if the matrix isn't square, an entry is negative, or a sum exceeds int64.
    """
    num_nodes = node_bytes.shape[0]
    if node_bytes.shape[1] != num_nodes:
        return -1
    src_dst_sums[:] = 0
    lowest = 0
    for src in range(num_nodes):
        for dst in range(num_nodes):
            size = node_bytes[src, dst]
            lowest = min(lowest, size)
            if src != dst:
                if src_dst_sums[0, src] > _MAX_BYTES - size or src_dst_sums[1, dst] > _MAX_BYTES - size:
                    return -1
                src_dst_sums[0, src] += size
                src_dst_sums[1, dst] += size
        if lowest < 0:
            return -1
    largest = 0
    for node in range(num_nodes):
        largest = max(largest, src_dst_sums[0, node], src_dst_sums[1, node])
    return largest


@compiled()
def _embed(node_bytes: Any, sums: Any, target: int, rest: Any, padding: Any) -> None:
    """Pad every row and column to ``target`` bytes, from the upper left corner; ``rest`` is entries plus padding."""
    num_nodes = node_bytes.shape[0]
    for src in range(num_nodes):
        for dst in range(num_nodes):
            rest[src, dst] = node_bytes[src, dst]
            padding[src, dst] = 0
        rest[src, src] = 0
    src = dst = 0
    while src < num_nodes and dst < num_nodes:
        size = min(target - sums[0, src], target - sums[1, dst])
        padding[src, dst] += size
        rest[src, dst] += size
        sums[0, src] += size
        sums[1, dst] += size
        if sums[0, src] == target:
            src += 1
        else:
            dst += 1


@compiled()
def _serve(rest: Any, padding: Any, match: Any, adjacent: Any, dst_node: Any, num_bytes: Any) -> int:
    """Take one stage, as long as its smallest entry; used-up entries leave the matching. Returns its length."""
    num_nodes = rest.shape[0]
    length = _MAX_BYTES
    for src in range(num_nodes):
        length = min(length, rest[src, match[DST_OF, src]])
    for src in range(num_nodes):
        dst = match[DST_OF, src]
        left = rest[src, dst]
        real = min(length, left - padding[src, dst])  # real bytes before padding
        dst_node[src] = dst if real > 0 else -1
        num_bytes[src] = max(real, 0)
        rest[src, dst] = left - length
        if left == length:
            adjacent[src, dst >> 6] &= ~(1 << (dst & 63))
            part(match, src)
    return length


@compiled()
def decompose_exactly(node_bytes: Any) -> Any:
    """Return ``dst_node``, ``num_bytes`` and ``duration_bytes`` of ``Stages``; ValueError for an invalid matrix.

    Pads the int64 matrix to equal row and column sums, then subtracts perfect matchings, each as long as its smallest
    entry. From stage to stage, only the pairs with no bytes left are matched again.
    """
    num_nodes = node_bytes.shape[0]
    num_words = (num_nodes + 63) >> 6
    work = np.empty((2 * num_nodes + num_words + NUM_ROWS + 2, num_nodes), np.int64)
    rest, padding = work[:num_nodes], work[num_nodes : 2 * num_nodes]
    match, sums = work[2 * num_nodes : 2 * num_nodes + NUM_ROWS], work[2 * num_nodes + NUM_ROWS :][:2]
    adjacent = work[2 * num_nodes + NUM_ROWS + 2 :].reshape(num_nodes, num_words)

    left = sum_up(node_bytes, sums)
    if left < 0:
        raise ValueError
    _embed(node_bytes, sums, left, rest, padding)
    num_entries = mark(rest, 1, _MAX_BYTES, adjacent)
    # Every stage uses up an entry, the last one num_nodes; and Johnson, Dulmage and Mendelsohn's bound.
    limit = max(0, min(num_nodes * num_nodes - 2 * num_nodes + 2, num_entries - num_nodes + 1))
    dst_node = np.empty((limit, num_nodes), np.int64)
    num_bytes = np.empty((limit, num_nodes), np.int64)
    duration_bytes = np.empty(limit, np.int64)
    clear(match)
    stage = 0
    while left > 0:
        is_perfect = complete(adjacent, match)
        assert is_perfect
        length = _serve(rest, padding, match, adjacent, dst_node[stage], num_bytes[stage])
        duration_bytes[stage] = length
        left -= length
        stage += 1
    return dst_node[:stage], num_bytes[:stage], duration_bytes[:stage]

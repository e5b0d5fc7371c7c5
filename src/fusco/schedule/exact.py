"""Birkhoff's decomposition: stages whose lengths sum to the largest row or column sum.

Source: FAST section 4.2 and 4.4, after G. Birkhoff (1946); the bound on the number of stages is that of Johnson,
Dulmage and Mendelsohn (1960). The state kept between stages, and its repair, are fusco's.

Matchings of nodes are on bitmasks: one bit for each possible partner, 64 per word. A matching is an int64 array
``match`` of shape (6, num_nodes); the constants below name its rows. ``adjacent`` is int64 (num_nodes, num_words): bit
``j % 64`` of word ``j // 64`` in row ``i`` is set if ``i`` may send to ``j``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusco.core.compiled import compiled

_MAX_BYTES = np.iinfo(np.int64).max
DST_OF = 0  # the destination of each source, -1 for none
SRC_OF = 1  # the source of each destination, -1 for none
FREE = 2  # bitmask of destinations without a source
_QUEUE = 3  # sources whose neighbours have not been visited yet
_REACHED_FROM = 4  # the source from which the search reached a destination
_SEEN = 5  # bitmask of destinations that the search has visited
NUM_ROWS = 6


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


@intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:  # noqa: ARG001  numba takes the argument's name from it
    """Return the index of the lowest set bit of a nonzero word."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@compiled()
def clear(match: Any) -> None:
    """Reset the matching: no node has a partner."""
    num_nodes = match.shape[1]
    for node in range(num_nodes):
        match[DST_OF, node] = -1
        match[SRC_OF, node] = -1
    for word in range((num_nodes + 63) >> 6):
        num_bits = min(64, num_nodes - (word << 6))
        match[FREE, word] = -1 if num_bits == 64 else (1 << num_bits) - 1


@compiled()
def mark(entries: Any, least: int, most: int, adjacent: Any) -> int:
    """Set the bits of all entries from ``least`` to ``most``, clear all others, and return the number of bits set."""
    num_nodes, num_marked = entries.shape[0], 0
    for src in range(num_nodes):
        for word in range(adjacent.shape[1]):
            bits, first = 0, word << 6
            for bit in range(min(64, num_nodes - first)):
                is_marked = int((entries[src, first + bit] >= least) & (entries[src, first + bit] <= most))
                bits |= is_marked << bit
                num_marked += is_marked
            adjacent[src, word] = bits
    return num_marked


@compiled()
def part(match: Any, src: int) -> None:
    """Remove the pair of a source from the matching."""
    dst = match[DST_OF, src]
    match[DST_OF, src] = -1
    match[SRC_OF, dst] = -1
    match[FREE, dst >> 6] |= 1 << (dst & 63)


@compiled()
def _flip(match: Any, src: int, dst: int, start: int) -> None:
    """Flip the alternating path from ``start`` to ``dst``: each source on it takes its next destination."""
    match[FREE, dst >> 6] &= ~(1 << (dst & 63))
    while True:
        previous_dst = match[DST_OF, src]
        match[DST_OF, src] = dst
        match[SRC_OF, dst] = src
        if src == start:
            return
        dst = previous_dst
        src = match[_REACHED_FROM, dst]


@compiled()
def augment(adjacent: Any, match: Any, start: int) -> bool:
    """Find a partner for ``start`` along a shortest augmenting path; false, without a change, if there is none."""
    num_words = adjacent.shape[1]
    for word in range(num_words):
        match[_SEEN, word] = 0
    match[_QUEUE, 0] = start
    head, tail = 0, 1
    while head < tail:
        src = match[_QUEUE, head]
        head += 1
        for word in range(num_words):
            hit = adjacent[src, word] & match[FREE, word]
            if hit:
                _flip(match, src, (word << 6) + lowest_bit(hit), start)
                return True
        for word in range(num_words):
            new = adjacent[src, word] & ~match[_SEEN, word]
            match[_SEEN, word] |= new
            while new:
                dst = (word << 6) + lowest_bit(new)
                new &= new - 1
                match[_REACHED_FROM, dst] = src
                match[_QUEUE, tail] = match[SRC_OF, dst]
                tail += 1
    return False


@compiled()
def complete(adjacent: Any, match: Any) -> bool:
    """Augment until every source has a partner; false as soon as one cannot get any."""
    for src in range(match.shape[1]):
        if match[DST_OF, src] < 0:
            has_partner = augment(adjacent, match, src)
            if not has_partner:
                return False
    return True

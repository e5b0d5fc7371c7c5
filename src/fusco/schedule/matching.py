"""One-to-one matchings of nodes on bitmasks: one bit for each possible partner, 64 per word.

Compiled helpers of ``exact`` and ``few``. A matching is an int64 array ``match`` of shape (6, num_nodes); the constants
below name its rows. ``adjacent`` is int64 (num_nodes, num_words): bit ``j % 64`` of word ``j // 64`` in row ``i`` is
set if ``i`` may send to ``j``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusco.core.compiled import compiled

DST_OF = 0  # the destination of each source, -1 for none
SRC_OF = 1  # the source of each destination, -1 for none
FREE = 2  # bitmask of destinations without a source
_QUEUE = 3  # sources whose neighbours have not been visited yet
_REACHED_FROM = 4  # the source from which the search reached a destination
_SEEN = 5  # bitmask of destinations that the search has visited
NUM_ROWS = 6


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

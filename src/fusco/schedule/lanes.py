"""Lanes between nodes: each local rank carries its share of what its node sends to another.

The bytes that a node has for another go over ``ranks_per_node`` lanes; lane ``l`` connects local rank ``l`` of both
nodes. Shares are equal, or in proportion to ``links``, int64 (ranks_per_node,), the links of each lane. Before sending,
ranks with more than a lane's share pass the surplus to ranks with less (balancing). After receiving, ranks forward what
is for other ranks of their node (redistribution). Source: FAST section 4.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.core.compiled import compiled

# Columns of the table of pieces: the lane's nodes and local rank, the message's local ranks, which of its bytes.
SRC_NODE, DST_NODE, LANE, SRC_LOCAL, DST_LOCAL, FIRST_BYTE, NUM_BYTES = range(7)
NUM_COLUMNS = 7


@compiled()
def lane_share(num_bytes: int, lane: int, link_ends: Any) -> int:
    """Return a lane's part of the first ``num_bytes`` of all lanes: a byte for each link, the remainder to low lanes.

    ``link_ends`` are the links of all lanes up to each.

    >>> [lane_share(7, lane, np.array([1, 1, 1]).cumsum()) for lane in range(3)]
    [3, 2, 2]
    >>> [lane_share(7, lane, np.array([2, 1, 1]).cumsum()) for lane in range(3)]
    [4, 2, 1]
    """
    total, before = link_ends[-1], link_ends[lane - 1] if lane else 0
    links = link_ends[lane] - before
    return num_bytes // total * links + min(max(num_bytes % total - before, 0), links)


@compiled()
def even_out(loads: Any, limits: Any, moved: Any) -> None:
    """Set ``moved[i, l]`` to what lane ``l`` takes of ``loads[i]``: its own first, then lanes with room the surplus.

    No lane takes more than ``limits[l]``, which together must be enough. The least possible moves.
    """
    num_lanes, lane = len(loads), 0
    moved[:] = 0
    for local in range(num_lanes):
        moved[local, local] = min(loads[local], limits[local])
    for local in range(num_lanes):
        surplus = loads[local] - moved[local, local]
        while surplus > 0:
            room = limits[lane] - moved[:, lane].sum()
            if room <= 0:
                lane += 1
                continue
            size = min(surplus, room)
            moved[local, lane] += size
            surplus -= size


@compiled()
def _add(pieces: Any, count: int, heads: Any, key: Any, size: int) -> int:
    """Append the next ``size`` bytes of message ``key = (src_node, dst_node, lane, src_local, dst_local)``."""
    for column in range(5):
        pieces[count, column] = key[column]
    pieces[count, FIRST_BYTE] = heads[key[4]]
    pieces[count, NUM_BYTES] = size
    heads[key[4]] += size
    return count + 1


@compiled()
def _cut_row(src: int, dst: int, local: int, row: Any, lanes: Any, pieces: Any, count: int) -> int:
    """Assign one rank's messages (``row``) to lanes that take ``lanes`` bytes of them; both end at zero."""
    num_lanes = row.shape[0]
    heads = np.zeros(num_lanes, np.int64)
    for lane in range(num_lanes):  # first the pieces that need no redistribution
        size = min(lanes[lane], row[lane])
        if size > 0:
            count = _add(pieces, count, heads, (src, dst, lane, local, lane), size)
            lanes[lane] -= size
            row[lane] -= size
    receiver = 0
    for lane in range(num_lanes):
        while lanes[lane] > 0:
            while row[receiver] == 0:
                receiver += 1
            size = min(lanes[lane], row[receiver])
            count = _add(pieces, count, heads, (src, dst, lane, local, receiver), size)
            lanes[lane] -= size
            row[receiver] -= size
    return count


@compiled()
def cut_into_lanes(tiles: Any, links: Any) -> Any:
    """Cut all messages between nodes into pieces, int64 (num_pieces, 7) with the columns named above.

    ``tiles[s, d, i, j]`` bytes go from local rank ``i`` of node ``s`` to local rank ``j`` of node ``d``.
    """
    num_nodes, _, num_lanes, _ = tiles.shape
    capacity = num_nodes * max(num_nodes - 1, 0) * num_lanes * (num_lanes + 4)
    pieces = np.empty((capacity, NUM_COLUMNS), np.int64)
    moved = np.empty((num_lanes, num_lanes), np.int64)
    shares, link_ends = np.empty(num_lanes, np.int64), links.cumsum()
    count = 0
    for src in range(num_nodes):
        for dst in range(num_nodes):
            if src == dst:
                continue
            loads = tiles[src, dst].sum(axis=1)
            for lane in range(num_lanes):
                shares[lane] = lane_share(loads.sum(), lane, link_ends)
            even_out(loads, shares, moved)
            for local in range(num_lanes):
                count = _cut_row(src, dst, local, tiles[src, dst, local].copy(), moved[local], pieces, count)
    return pieces[:count]


@compiled()
def cut_into_stages(pieces: Any, num_nodes: int, links: Any, dst_node: Any, num_bytes: Any) -> Any:
    """Cut pieces, sorted by nodes and lane, at the ends of stages: int64 (num_pieces, 8), the last column is the stage.

    In every stage, each lane carries its share.
    """
    num_stages, num_lanes, link_ends = dst_node.shape[0], len(links), links.cumsum()
    next_piece = np.zeros((num_nodes, num_nodes, num_lanes), np.int64)
    for piece in range(len(pieces) - 1, -1, -1):
        next_piece[pieces[piece, SRC_NODE], pieces[piece, DST_NODE], pieces[piece, LANE]] = piece
    used = np.zeros(len(pieces), np.int64)
    sent = np.zeros((num_nodes, num_nodes), np.int64)
    cut = np.empty((len(pieces) + num_lanes * (dst_node >= 0).sum(), NUM_COLUMNS + 1), np.int64)
    count = 0
    for stage in range(num_stages):
        for src in range(num_nodes):
            dst = dst_node[stage, src]
            if dst < 0:
                continue
            before, after = sent[src, dst], sent[src, dst] + num_bytes[stage, src]
            sent[src, dst] = after
            for lane in range(num_lanes):
                left = lane_share(after, lane, link_ends) - lane_share(before, lane, link_ends)
                piece = next_piece[src, dst, lane]
                while left > 0:
                    size = min(left, pieces[piece, NUM_BYTES] - used[piece])
                    cut[count, :NUM_COLUMNS] = pieces[piece]
                    cut[count, FIRST_BYTE] += used[piece]
                    cut[count, NUM_BYTES] = size
                    cut[count, NUM_COLUMNS] = stage
                    count += 1
                    used[piece] += size
                    left -= size
                    if used[piece] == pieces[piece, NUM_BYTES]:
                        piece += 1
                next_piece[src, dst, lane] = piece
    return cut[:count]

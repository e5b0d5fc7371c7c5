"""Schedule of an all-to-all: all transfers within and between nodes, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusco.core.lanes import IntArray
from fusco.core.topology import ScheduleMode, Topology
from fusco.schedule import lanes
from fusco.schedule.decomposition import decompose, spread_out
from fusco.schedule.stages import Stages, Transfers, as_matrix

_SRC_LOCAL, _SRC_LANE = (lanes.SRC_NODE, lanes.SRC_LOCAL), (lanes.SRC_NODE, lanes.LANE)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """Four kinds of transfers that together deliver every byte. The schedule is the same on every rank.

    Attributes:
        topology: which ranks share a node.
        rank_bytes: int64 (world_size, world_size), the bytes that each rank has for each.
        mode: how the stages were made.
        lane_links: links of each lane, by local rank: a lane with two carries twice the share of one with one.
        stages: partners between nodes, in bytes of all lanes together.
        local: messages within nodes, including those of a rank to itself; they have no dependencies.
        balancing: within nodes, before any stage: pieces for the rank whose lane carries them.
        internode: between nodes, from a local rank to its counterpart on another node, by stage.
        redistribution: within nodes, after the piece's stage: from the lane's end to the message's destination.

    ``local`` and ``balancing`` are in the order of shifted diagonals (SpreadOut) within each node, ``internode`` and
    ``redistribution`` in order of stages. The unit may also be rows or vectors instead of bytes.
    """

    topology: Topology
    rank_bytes: IntArray
    mode: ScheduleMode
    lane_links: tuple[int, ...]
    stages: Stages
    local: Transfers
    balancing: Transfers
    internode: Transfers
    redistribution: Transfers


def make_schedule(
    rank_bytes: Any, topology: Topology, *, mode: ScheduleMode = "exact", lane_links: tuple[int, ...] | None = None
) -> Schedule:
    """Schedule an all-to-all: balance within nodes, send in one-to-one stages between nodes, redistribute.

    Args:
        rank_bytes: integers (world_size, world_size), the bytes that rank ``i`` (row) has for rank ``j``.
        topology: which ranks share a node.
        mode: of the stages: ``"exact"``, ``"few"`` (see ``decompose``) or ``"spread-out"``; stages of the first two
            are in ascending order of length.
        lane_links: positive links of each lane, by local rank; ``None`` means one each.

    Raises:
        TypeError, ValueError: as ``decompose``, and if matrix, topology or links have different numbers of ranks.

    Source: FAST section 4.1 to 4.3. Two nodes of two ranks; B0 (rank 2) has 8 bytes for node A, B1 has 4, as in FAST's
    Fig. 7. B0 gives B1 2 bytes, then both send 6 to their counterparts.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> rank_bytes = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [6, 2, 0, 0], [2, 2, 0, 0]])
    >>> schedule = make_schedule(rank_bytes, topology)
    >>> [(int(f), int(t), int(n)) for f, t, n in zip(
    ...     schedule.balancing.from_rank, schedule.balancing.to_rank, schedule.balancing.num_bytes)]
    [(2, 3, 2)]
    >>> schedule.internode.load(4).tolist()
    [[0, 0, 6, 6], [6, 6, 0, 0]]
    """
    matrix = _checked(rank_bytes, topology, mode)
    node_to_ranks = np.array(topology.node_to_ranks)
    tiles = np.ascontiguousarray(matrix[node_to_ranks[:, None, :, None], node_to_ranks[None, :, None, :]])
    node_bytes = _sum_tiles(tiles)
    stages = spread_out(node_bytes) if mode == "spread-out" else decompose(node_bytes, mode=mode).shortest_first()
    links = _checked_links(lane_links or (1,) * topology.ranks_per_node, topology)
    pieces = _sorted_pieces(lanes.cut_into_lanes(tiles, links), topology.num_nodes, len(links))
    cut = lanes.cut_into_stages(pieces, topology.num_nodes, links, stages.dst_node, stages.num_bytes)
    internode = _transfers(cut, node_to_ranks, _SRC_LANE, (lanes.DST_NODE, lanes.LANE), cut[:, lanes.NUM_COLUMNS])
    arrived = internode.select(internode.to_rank != internode.dst_rank)
    return Schedule(
        topology=topology,
        rank_bytes=matrix,
        mode=mode,
        lane_links=tuple(links.tolist()),
        stages=stages,
        local=_local(matrix, topology),
        balancing=_balancing(pieces, node_to_ranks),
        internode=internode,
        redistribution=replace(arrived, from_rank=arrived.to_rank, to_rank=arrived.dst_rank),
    )


def warm_up() -> None:
    """Compile everything that schedules, or load it from the disk cache (seconds once, then milliseconds)."""
    decompose(np.ones((2, 2), np.int64), mode="few")
    make_schedule(np.ones((4, 4), np.int64), Topology.of_equal_nodes(4, 2), mode="exact")


def _checked(rank_bytes: Any, topology: Topology, mode: str) -> IntArray:
    if mode not in ("exact", "few", "spread-out"):
        raise ValueError(f"mode must be one of 'exact', 'few', 'spread-out', got {mode!r}")
    matrix = as_matrix(rank_bytes, "rank_bytes", end="rank")
    if len(matrix) != topology.world_size:
        raise ValueError(f"rank_bytes is for {len(matrix)} ranks, the topology has {topology.world_size}")
    return matrix


def _checked_links(lane_links: tuple[int, ...], topology: Topology) -> IntArray:
    if len(lane_links) != topology.ranks_per_node or min(lane_links) < 1:
        raise ValueError(f"lane_links must be {topology.ranks_per_node} positive numbers, got {lane_links}")
    return np.array(lane_links, np.int64)


def _sum_tiles(tiles: IntArray) -> IntArray:
    """Sum tiles to a node-to-node matrix, zero on the diagonal; ``ValueError`` if a sum exceeds int64."""
    node_bytes = tiles.sum(axis=(2, 3))
    rough = tiles.sum(axis=(2, 3), dtype=np.float64)
    np.fill_diagonal(node_bytes, 0)
    np.fill_diagonal(rough, 0)
    if rough.max(initial=0) > 2.0**62:
        for src, dst in np.ndindex(*node_bytes.shape):
            total = sum(map(int, tiles[src, dst].flat)) if src != dst else 0
            if total > np.iinfo(np.int64).max:
                raise ValueError(f"node {src} has {total} bytes for node {dst}, more than int64 holds")
    return node_bytes


def _sorted_pieces(pieces: IntArray, num_nodes: int, num_lanes: int) -> IntArray:
    """Sort pieces by nodes and lane; on each lane, those that need no balancing come first: they can leave at once."""
    pair = pieces[:, lanes.SRC_NODE] * num_nodes + pieces[:, lanes.DST_NODE]
    lane = pieces[:, lanes.LANE]
    key = (pair * num_lanes + lane) * 2 + (lane != pieces[:, lanes.SRC_LOCAL])
    return pieces[np.argsort(key, kind="stable")]


def _local(rank_bytes: IntArray, topology: Topology) -> Transfers:
    rank_to_node, rank_to_local = np.array(topology.rank_to_node), np.array(topology.rank_to_local)
    src, dst = np.nonzero(rank_bytes * (rank_to_node[:, None] == rank_to_node))
    shift = (rank_to_local[dst] - rank_to_local[src]) % topology.ranks_per_node
    order = np.argsort(shift, kind="stable")
    src, dst = src[order], dst[order]
    return Transfers(
        from_rank=src,
        to_rank=dst,
        src_rank=src,
        dst_rank=dst,
        first_byte=np.zeros(len(src), np.int64),
        num_bytes=rank_bytes[src, dst],
        stage=np.full(len(src), -1),
    )


def _balancing(pieces: IntArray, node_to_ranks: IntArray) -> Transfers:
    moved = pieces[pieces[:, lanes.LANE] != pieces[:, lanes.SRC_LOCAL]]
    shift = (moved[:, lanes.LANE] - moved[:, lanes.SRC_LOCAL]) % node_to_ranks.shape[1]
    moved = moved[np.argsort(shift, kind="stable")]
    return _transfers(moved, node_to_ranks, _SRC_LOCAL, _SRC_LANE, np.full(len(moved), -1))


def _transfers(
    pieces: IntArray, node_to_ranks: IntArray, sender: tuple[int, int], receiver: tuple[int, int], stage: IntArray
) -> Transfers:
    """Return pieces as transfers; ``sender`` and ``receiver`` are the columns of their nodes and local ranks."""

    def ranks(columns: tuple[int, int]) -> IntArray:
        return node_to_ranks[pieces[:, columns[0]], pieces[:, columns[1]]]

    return Transfers(
        from_rank=ranks(sender),
        to_rank=ranks(receiver),
        src_rank=ranks(_SRC_LOCAL),
        dst_rank=ranks((lanes.DST_NODE, lanes.DST_LOCAL)),
        first_byte=pieces[:, lanes.FIRST_BYTE].copy(),
        num_bytes=pieces[:, lanes.NUM_BYTES].copy(),
        stage=stage.copy(),
    )

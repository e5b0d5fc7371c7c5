"""One ``shuffle`` of segments in numbers, as ``fusco plan --shuffle`` prints it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.core.topology import Topology
from fusco.engine.all_to_all import are_lanes_worth_it
from fusco.schedule.cost import CPU_LINKS, schedule_for
from fusco.schedule.stages import IntArray, lower_bound_bytes


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank sends and receives between nodes; ``plain``: if every rank sends its segments itself."""

    rank: int
    node: int
    plain_sends: int
    plain_receives: int
    sends: int
    receives: int


@dataclass(frozen=True)
class CarriedBytes:
    """Bytes of a rank for another node that a rank of its own node sends."""

    carrier: int
    rank: int
    to_node: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ShuffleRecord:
    """A shuffle for all ranks. ``bound_bytes`` are those of a rank of the busiest node, if its ranks share them evenly.

    Without lanes (``has_lanes``) every rank sends its segments itself. ``handed_on_bytes`` arrive at another rank than
    their destination and cross its node once more, as ``carried`` do before they are sent.
    """

    matrix: str
    nodes: int
    ranks_per_node: int
    slice_bytes: int
    has_lanes: bool
    bound_bytes: int
    ranks: list[RankBytes]
    carried: list[CarriedBytes]
    handed_on_bytes: int


def explain_shuffle(matrix: str, rank_bytes: IntArray, topology: Topology, slice_bytes: int) -> ShuffleRecord:
    """Plan a shuffle on the CPU in which rank ``i`` has ``rank_bytes[i, j]`` for rank ``j``, and return its figures.

    Rank 0 has 8 MB for node 1, and rank 1 sends half of them:

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> rank_bytes = np.array([[0, 0, 4, 4], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]) * 10**6
    >>> explain_shuffle("example", rank_bytes, topology, slice_bytes=10**6).carried
    [CarriedBytes(carrier=1, rank=0, to_node=1, num_bytes=4000000)]
    """
    nodes = np.array(topology.rank_to_node)
    is_node = np.eye(topology.num_nodes, dtype=np.int64)[nodes]
    crossing = np.where(nodes[:, None] != nodes, rank_bytes, 0)
    has_lanes = are_lanes_worth_it(rank_bytes, topology, slice_bytes)
    plain = loads = np.stack((crossing.sum(axis=1), crossing.sum(axis=0)))
    carried: list[CarriedBytes] = []
    handed_on = 0
    if has_lanes:
        schedule = schedule_for(crossing, topology, CPU_LINKS)
        sent = schedule.internode
        loads, handed_on = sent.load(topology.world_size), int(schedule.redistribution.num_bytes.sum())
        of_others = sent.select(sent.from_rank != sent.src_rank)
        ends = np.stack((of_others.from_rank, of_others.src_rank, nodes[of_others.dst_rank]))
        found, which = np.unique(ends, axis=1, return_inverse=True)
        sizes = np.zeros(found.shape[1], np.int64)
        np.add.at(sizes, which.ravel(), of_others.num_bytes)
        carried = [CarriedBytes(*column) for column in np.vstack((found, sizes)).T.tolist()]
    return ShuffleRecord(
        matrix=matrix,
        nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        slice_bytes=slice_bytes,
        has_lanes=has_lanes,
        bound_bytes=-(-lower_bound_bytes(is_node.T @ crossing @ is_node) // topology.ranks_per_node),
        ranks=[
            RankBytes(rank, node, *plain[:, rank].tolist(), *loads[:, rank].tolist())
            for rank, node in enumerate(topology.rank_to_node)
        ],
        carried=carried,
        handed_on_bytes=handed_on,
    )

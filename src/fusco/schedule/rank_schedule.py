"""Rank schedule: the flows that one rank sends and receives, in order, and the memory of their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.core.lanes import IntArray
from fusco.schedule.schedule import Schedule
from fusco.schedule.stages import Transfers

# Memories of a rank: its input, its output, and two buffers for bytes between two transfers.
INPUT, OUTPUT, CARRIED, ARRIVED = range(4)
NUM_MEMORIES = 4

# Columns of a table of pieces. A piece of CARRIED or ARRIVED can be read once it has arrived. One flow fills each
# region, in order, so the piece is there once the region is filled to its end. Region -1: always there.
MEMORY, OFFSET, NUM_BYTES, REGION = range(4)


@dataclass(frozen=True, eq=False)
class Flow:
    """Byte stream from one rank to another, with the same number of bytes on both ends."""

    peer: int  # the other rank
    stage: int  # of the schedule, -1 for none
    # int64 (num_pieces, 4) with the columns named above: the source or target of the bytes on this rank
    pieces: IntArray

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all pieces."""
        return int(self.pieces[:, NUM_BYTES].sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class RankSchedule:
    """The flows of one rank. Each list is in order; different lists may advance concurrently.

    Within a node, the flows between two ranks are: the bytes that the other carries for this rank (*balancing*, in the
    order in which they leave the node), the message between the two, then, stage by stage, the bytes that arrived for
    the other (*redistribution*). Each flow depends only on earlier stages or on earlier flows of its list, so there is
    no circular wait.
    """

    own: tuple[IntArray, IntArray]  # the rank's message to itself: one piece of ``INPUT`` and one of ``OUTPUT``
    sends_within: dict[int, list[Flow]]  # flows to each other rank of the node, by rank
    receives_within: dict[int, list[Flow]]  # flows from each of them
    sends_across: list[Flow]  # flows to counterparts on other nodes, by stage, at most one in each
    receives_across: list[Flow]  # flows from counterparts
    spare_bytes: tuple[int, int]  # sizes of ``CARRIED`` and ``ARRIVED``, the buffers between two transfers
    num_regions: int  # total regions of ``CARRIED`` and ``ARRIVED``


def make_rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """Extract the flows of one rank from a schedule.

    Messages are in ``INPUT`` by destination and in ``OUTPUT`` by source, without gaps, as in ``all_to_all_single``.
    ``CARRIED`` holds what this rank's lane carries for other ranks of its node, ``ARRIVED`` what arrives here for them.
    Together they are at most what the rank sends and receives between nodes after balancing.

    FAST's Fig. 7: B0 (rank 2) gives B1 two bytes of its message to A0, the first that use the lane of B1.

    >>> from fusco.schedule import make_schedule
    >>> from fusco.core.topology import Topology
    >>> rank_bytes = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [6, 2, 0, 0], [2, 2, 0, 0]])
    >>> schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(world_size=4, ranks_per_node=2))
    >>> [flow.pieces.tolist() for flow in make_rank_schedule(schedule, 2).sends_within[3]]
    [[[0, 6, 2, -1]]]
    >>> [flow.pieces.tolist() for flow in make_rank_schedule(schedule, 3).sends_across]
    [[[0, 2, 2, -1], [0, 0, 2, -1], [2, 0, 2, 0]]]
    """
    topology, rank_bytes = schedule.topology, schedule.rank_bytes
    input_start, output_start = _starts(rank_bytes[rank]), _starts(rank_bytes[:, rank])
    neighbours = [peer for peer in topology.node_to_ranks[topology.rank_to_node[rank]] if peer != rank]
    leaving, arriving = schedule.internode.sent_by(rank), schedule.internode.received_by(rank)
    balanced_out = schedule.internode.select(schedule.internode.src_rank == rank)
    redistributed = schedule.redistribution.received_by(rank)
    out, carried_bytes = _leaving(leaving, rank, input_start, topology.rank_to_local)
    into, arrived_bytes = _arriving(arriving, rank, output_start, topology.ranks_per_node)
    sent_pieces = _pieces(INPUT, input_start[balanced_out.dst_rank] + balanced_out.first_byte, balanced_out.num_bytes)
    received_pieces = _pieces(
        OUTPUT, output_start[redistributed.src_rank] + redistributed.first_byte, redistributed.num_bytes
    )

    def message(memory: int, start: IntArray, src: int, dst: int) -> IntArray:
        return _pieces(memory, start[[dst if memory == INPUT else src]], rank_bytes[[src], [dst]])

    sends, receives = {}, {}
    for peer in neighbours:
        to_peer, from_peer = balanced_out.from_rank == peer, leaving.src_rank == peer
        is_for_peer, from_peer_back = arriving.dst_rank == peer, redistributed.from_rank == peer
        local = (message(INPUT, input_start, rank, peer), message(OUTPUT, output_start, peer, rank))
        sends[peer] = [Flow(peer, -1, sent_pieces[to_peer]), Flow(peer, -1, local[0])]
        sends[peer] += _by_stage(peer, arriving.stage[is_for_peer], into[is_for_peer])
        receives[peer] = [Flow(peer, -1, out[from_peer]), Flow(peer, -1, local[1])]
        receives[peer] += _by_stage(peer, redistributed.stage[from_peer_back], received_pieces[from_peer_back])
    return RankSchedule(
        own=(message(INPUT, input_start, rank, rank), message(OUTPUT, output_start, rank, rank)),
        sends_within={peer: _without_empty(flows) for peer, flows in sends.items()},
        receives_within={peer: _without_empty(flows) for peer, flows in receives.items()},
        sends_across=_by_stage(leaving.to_rank, leaving.stage, out),
        receives_across=_by_stage(arriving.from_rank, arriving.stage, into),
        spare_bytes=(carried_bytes, arrived_bytes),
        num_regions=topology.ranks_per_node + schedule.stages.num_stages,
    )


def _starts(sizes: IntArray) -> IntArray:
    return np.cumsum(sizes) - sizes


def _pieces(memory: int | IntArray, offset: IntArray, num_bytes: IntArray, region: int | IntArray = -1) -> IntArray:
    columns = np.broadcast_arrays(memory, offset, num_bytes, region)
    return np.stack(columns, axis=1).astype(np.int64)


def _leaving(
    leaving: Transfers, rank: int, input_start: IntArray, rank_to_local: tuple[int, ...]
) -> tuple[IntArray, int]:
    """Return the pieces that leave the node from here, and the size of CARRIED: one region for each local rank."""
    is_own = leaving.src_rank == rank
    carried = np.where(is_own, 0, leaving.num_bytes)
    order = np.argsort(leaving.src_rank, kind="stable")
    offset = np.empty_like(carried)
    offset[order] = _starts(carried[order])
    offset = np.where(is_own, input_start[leaving.dst_rank] + leaving.first_byte, offset)
    region = np.where(is_own, -1, np.array(rank_to_local)[leaving.src_rank])
    return _pieces(np.where(is_own, INPUT, CARRIED), offset, leaving.num_bytes, region), int(carried.sum())


def _arriving(arriving: Transfers, rank: int, output_start: IntArray, num_locals: int) -> tuple[IntArray, int]:
    """Return the pieces for what arrives from other nodes, and the size of ARRIVED: one region for each stage."""
    is_own = arriving.dst_rank == rank
    kept = np.where(is_own, 0, arriving.num_bytes)
    offset = np.where(is_own, output_start[arriving.src_rank] + arriving.first_byte, _starts(kept))
    region = np.where(is_own, -1, num_locals + arriving.stage)
    return _pieces(np.where(is_own, OUTPUT, ARRIVED), offset, arriving.num_bytes, region), int(kept.sum())


def _by_stage(peer: int | IntArray, stage: IntArray, pieces: IntArray) -> list[Flow]:
    """Return one flow for each stage; ``stage`` ascends, and each stage has one peer."""
    peers = np.broadcast_to(peer, stage.shape)
    firsts = np.flatnonzero(np.append(True, stage[1:] != stage[:-1])[: len(stage)])
    return [
        Flow(int(peers[first]), int(stage[first]), pieces[first:end])
        for first, end in zip(firsts, [*firsts[1:], len(stage)], strict=False)
    ]


def _without_empty(flows: list[Flow]) -> list[Flow]:
    return [flow for flow in flows if flow.total_bytes]

"""One rank's part of a schedule: which bytes of its memories go to whom, come from whom, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.schedule.schedule import Schedule
from fusco.schedule.stages import IntArray
from fusco.schedule.transfers import Transfers

# Memories of a rank: what it was given, where its result goes, and two that hold bytes between two transfers.
INPUT, OUTPUT, CARRIED, ARRIVED = range(4)
NUM_MEMORIES = 4

# Columns of a table of pieces. What is read from CARRIED or ARRIVED must be there first: each of their regions is
# filled by one flow, in order, so it is there once the region is filled to the piece's end. -1: always there.
MEMORY, OFFSET, NUM_BYTES, REGION = range(4)


@dataclass(frozen=True, eq=False)
class Flow:
    """Bytes that travel from one rank to another as one, in order: the same number on both ends.

    Attributes:
        peer: the other rank.
        stage: of the schedule, -1 for what belongs to none.
        pieces: int64 (num_pieces, 4) with the columns named above, where they stand or shall stand on this rank.

    """

    peer: int
    stage: int
    pieces: IntArray

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.pieces[:, NUM_BYTES].sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class RankSchedule:
    """What one rank of a schedule does. Each list is in order; different lists may advance beside each other.

    Within a node, the flows between two ranks are: what the other carries for this one (*balancing*, in the order
    in which it crosses), the message between the two, then, stage by stage, what came for the other (*redistribution*).
    Each needs only what is in earlier stages or earlier on its list, so whoever follows all lists never waits in a
    circle.

    Attributes:
        own: the message to the rank itself: one piece of ``INPUT`` and one of ``OUTPUT``.
        sends_within: flows to each rank of the node, by rank.
        receives_within: flows from each.
        sends_across: to the same local rank of other nodes, by stage, one at most in each.
        receives_across: from there.
        memory_bytes: size of each memory (``INPUT``, ``OUTPUT``, ``CARRIED``, ``ARRIVED``).
        num_regions: of ``CARRIED`` and ``ARRIVED`` together.

    """

    own: tuple[IntArray, IntArray]
    sends_within: dict[int, list[Flow]]
    receives_within: dict[int, list[Flow]]
    sends_across: list[Flow]
    receives_across: list[Flow]
    memory_bytes: tuple[int, ...]
    num_regions: int

    @property
    def spare_bytes(self) -> tuple[int, int]:
        """Sizes of the memories that hold bytes between two transfers: ``CARRIED`` and ``ARRIVED``."""
        return self.memory_bytes[CARRIED], self.memory_bytes[ARRIVED]


def make_rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """Say what a rank does in a schedule.

    Messages stand in ``INPUT`` by destination and in ``OUTPUT`` by source, without gaps, as ``all_to_all_single`` has
    them. ``CARRIED`` is as large as what lanes of this rank carry for others of its node, ``ARRIVED`` as what arrives
    here for others; together at most what the rank sends and receives between nodes after balancing.

    FAST's Fig. 7: B0 (rank 2) hands two bytes of its message to A0 (the first that cross the lane of B1) to B1.

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
    leaving, arriving = schedule.crossing.sent_by(rank), schedule.crossing.received_by(rank)
    handed_over = schedule.crossing.select(schedule.crossing.src_rank == rank)
    handed_on = schedule.redistribution.received_by(rank)
    out, carried_bytes = _leaving(leaving, rank, input_start, topology.rank_to_local)
    into, arrived_bytes = _arriving(arriving, rank, output_start, topology.ranks_per_node)
    given = _pieces(INPUT, input_start[handed_over.dst_rank] + handed_over.first_byte, handed_over.num_bytes)
    taken = _pieces(OUTPUT, output_start[handed_on.src_rank] + handed_on.first_byte, handed_on.num_bytes)

    def message(memory: int, start: IntArray, src: int, dst: int) -> IntArray:
        return _pieces(memory, start[[dst if memory == INPUT else src]], rank_bytes[[src], [dst]])

    sends, receives = {}, {}
    for peer in neighbours:
        to_peer, from_peer = handed_over.from_rank == peer, leaving.src_rank == peer
        on, back = arriving.dst_rank == peer, handed_on.from_rank == peer
        local = (message(INPUT, input_start, rank, peer), message(OUTPUT, output_start, peer, rank))
        sends[peer] = [Flow(peer, -1, given[to_peer]), Flow(peer, -1, local[0])]
        sends[peer] += _by_stage(peer, arriving.stage[on], into[on])
        receives[peer] = [Flow(peer, -1, out[from_peer]), Flow(peer, -1, local[1])]
        receives[peer] += _by_stage(peer, handed_on.stage[back], taken[back])
    return RankSchedule(
        own=(message(INPUT, input_start, rank, rank), message(OUTPUT, output_start, rank, rank)),
        sends_within={peer: _not_empty(flows) for peer, flows in sends.items()},
        receives_within={peer: _not_empty(flows) for peer, flows in receives.items()},
        sends_across=_by_stage(leaving.to_rank, leaving.stage, out),
        receives_across=_by_stage(arriving.from_rank, arriving.stage, into),
        memory_bytes=(int(rank_bytes[rank].sum()), int(rank_bytes[:, rank].sum()), carried_bytes, arrived_bytes),
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
    """Where what crosses from here stands, and the size of CARRIED: one region for each local rank carried for."""
    is_own = leaving.src_rank == rank
    carried = np.where(is_own, 0, leaving.num_bytes)
    order = np.argsort(leaving.src_rank, kind="stable")
    offset = np.empty_like(carried)
    offset[order] = _starts(carried[order])
    offset = np.where(is_own, input_start[leaving.dst_rank] + leaving.first_byte, offset)
    region = np.where(is_own, -1, np.array(rank_to_local)[leaving.src_rank])
    return _pieces(np.where(is_own, INPUT, CARRIED), offset, leaving.num_bytes, region), int(carried.sum())


def _arriving(arriving: Transfers, rank: int, output_start: IntArray, num_locals: int) -> tuple[IntArray, int]:
    """Where what crosses to here shall stand, and the size of ARRIVED: one region for each stage."""
    is_own = arriving.dst_rank == rank
    kept = np.where(is_own, 0, arriving.num_bytes)
    offset = np.where(is_own, output_start[arriving.src_rank] + arriving.first_byte, _starts(kept))
    region = np.where(is_own, -1, num_locals + arriving.stage)
    return _pieces(np.where(is_own, OUTPUT, ARRIVED), offset, arriving.num_bytes, region), int(kept.sum())


def _by_stage(peer: int | IntArray, stage: IntArray, pieces: IntArray) -> list[Flow]:
    """One flow for each stage; ``stage`` ascends, and each has one peer."""
    peers = np.broadcast_to(peer, stage.shape)
    firsts = np.flatnonzero(np.append(True, stage[1:] != stage[:-1])[: len(stage)])
    return [
        Flow(int(peers[first]), int(stage[first]), pieces[first:end])
        for first, end in zip(firsts, [*firsts[1:], len(stage)], strict=False)
    ]


def _not_empty(flows: list[Flow]) -> list[Flow]:
    return [flow for flow in flows if flow.total_bytes]

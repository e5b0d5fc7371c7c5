"""Lanes from the view of one rank: what it sends, what its node receives, and where its rows come back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fusco.core.lanes import IntArray, Lanes, Runs, sums_before
from fusco.core.topology import RankLinks
from fusco.planner.lanes import most_of_link


@dataclass(frozen=True, eq=False)
class RankLanes:
    """The runs of lanes that concern one rank.

    Rows that cross between nodes have a place in the memory of the rank that receives them: in a dispatch that is the
    forwarder, in a combine, whose sums return, the carrier. A rank's places are in the order of its runs.
    """

    rank: int
    lanes: Lanes

    @property
    def node(self) -> int:
        """The rank's node."""
        return self.lanes.topology.rank_to_node[self.rank]

    @cached_property
    def carried(self) -> Runs:
        """Runs that this rank sends."""
        return self.lanes.runs.select(self.lanes.runs.carrier == self.rank)

    @cached_property
    def incoming(self) -> Runs:
        """Runs for this rank's node, those of the next node first, so that nodes do not all return to the same one."""
        runs, num_nodes = self.lanes.runs, self.lanes.topology.num_nodes
        index = np.flatnonzero(runs.node == self.node)
        if num_nodes > 2:
            index = index[np.argsort((self._nodes[runs.src[index]] - self.node) % num_nodes, kind="stable")]
        return runs.select(index)

    @cached_property
    def received(self) -> Runs:
        """Runs that this rank receives."""
        return self.incoming.select(self.incoming.forwarder == self.rank)

    @cached_property
    def _outgoing(self) -> Runs:
        return self.lanes.runs.select(self._nodes[self.lanes.runs.src] == self.node)

    @cached_property
    def _nodes(self) -> IntArray:
        """Node of each rank."""
        return np.array(self.lanes.topology.rank_to_node)

    @cached_property
    def own(self) -> Runs:
        """Runs of this rank's rows, by node and row."""
        return self._outgoing.select(self._own_index)

    @property
    def own_places(self) -> IntArray:
        """The first place of each of them in the carrier's memory, in rows."""
        return self._outgoing.offsets_by(self._outgoing.carrier)[self._own_index]

    def own_chunks(self, rows_per_chunk: int) -> IntArray:
        """Return the chunks that return to the carrier from the same forwarder before those of each run of ``own``."""
        runs, world_size = self._outgoing, self.lanes.topology.world_size
        return chunks_before(runs, runs.carrier * world_size + runs.forwarder, rows_per_chunk)[self._own_index]

    @cached_property
    def _own_index(self) -> IntArray:
        runs = self._outgoing
        mine = np.flatnonzero(runs.src == self.rank)
        return mine[np.lexsort((runs.first[mine], runs.node[mine]))]


def chunks_before(runs: Runs, connection: IntArray, rows_per_chunk: int) -> IntArray:
    """Return the chunks of earlier runs with the same ``connection``; every run starts a chunk."""
    return sums_before(-(-runs.num_rows // rows_per_chunk), connection)


def most_crossing_rows(num_rows: int, rank_links: RankLinks | None) -> int:
    """Return the rows that lanes give a rank at most, to send or to receive, if each has ``num_rows`` at most.

    >>> most_crossing_rows(1000, None), most_crossing_rows(1000, ((2, 1), (2, 1)))
    (1000, 1344)
    """
    if rank_links is None:
        return num_rows
    total = num_rows * len(rank_links[0])
    share = -(-total // min(map(sum, rank_links)))
    return max(num_rows, min(total, max(map(max, rank_links)) * int(most_of_link(share))))


def lane_links(rank_links: RankLinks | None) -> tuple[int, ...] | None:
    """Return the links of each lane between counterparts, which is as fast as the slower of its ends.

    >>> lane_links(((2, 1), (1, 1))), lane_links(None)
    ((1, 1), None)
    """
    return None if rank_links is None else tuple(map(min, zip(*rank_links, strict=True)))

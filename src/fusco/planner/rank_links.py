"""Links of ranks: a rank that owns more NICs than another takes a larger share of what its node sends and receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fusco.core.config import RankLinks
from fusco.core.topology import Topology
from fusco.planner.lanes import most_of_link
from fusco.rails.rail import owners_of


def links_of_ranks(topology: Topology, networks: Sequence[int], num_rails: int) -> RankLinks | None:
    """Return the NICs of each rank, in a unit in which all are integers; ``None`` if all ranks have as many.

    The ranks of a node that are in one network namespace, ``networks[rank]``, share its rails as ``owners_of`` says.

    Three rails for two ranks, and two for three:

    >>> links_of_ranks(Topology.of_equal_nodes(4, 2), [7, 7, 8, 8], num_rails=3)
    ((2, 1), (2, 1))
    >>> links_of_ranks(Topology.of_equal_nodes(3, 3), [7, 7, 7], num_rails=2)
    ((1, 2, 1),)
    >>> links_of_ranks(Topology.of_equal_nodes(4, 2), [7, 7, 8, 9], num_rails=2)
    ((1, 1), (2, 2))
    """
    shares = [Fraction(0)] * topology.world_size
    for ranks in topology.node_to_ranks:
        for network in {networks[rank] for rank in ranks}:
            together = [rank for rank in ranks if networks[rank] == network]
            for owners in owners_of(num_rails, len(together)):
                for worker in owners:
                    shares[together[worker]] += Fraction(1, len(owners))
    if len(set(shares)) == 1:
        return None
    unit = math.lcm(*(share.denominator for share in shares))
    return tuple(tuple(int(shares[rank] * unit) for rank in ranks) for ranks in topology.node_to_ranks)


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

"""Links of ranks: a rank that owns more NICs than another takes a larger share of what its node sends and receives."""

from __future__ import annotations

from fusco.core.topology import RankLinks
from fusco.planner.lanes import most_of_link


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

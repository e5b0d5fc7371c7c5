"""Numbers of rows that ranks publish, and lanes of a dispatch, checked to be the same on all ranks."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

from fusco.core.errors import MismatchError
from fusco.core.lanes import Groups, Lanes
from fusco.core.profile import Call
from fusco.planner.balancer import Balancer, is_builtin
from fusco.planner.traffic import Traffic

_MAX_CHARS = 48  # longest text of groups in an error, since the text of a record is short


def agreed_lanes(call: Call, balancer: Balancer, traffic: Traffic, max_rows: int) -> Lanes:
    """Compute lanes from traffic that all ranks know; ``MismatchError`` on all ranks if theirs differ.

    Only a user-defined balancer may return different ones on different ranks. So only with such a balancer do ranks
    exchange records once more, before any rows are sent: rows for the wrong forwarder would end in a timeout. That
    takes 0.6 to 2.7 ms (medians; four ranks on two busy cores, loopback). Within one node nothing depends on lanes,
    and nodes of one rank have only one to each other node.

    ``ValueError`` if a rank would send or receive more than ``max_rows``, for which it has memory.
    """
    chosen, topology = balancer(traffic), traffic.topology
    needs_check = topology.num_nodes > 1 and topology.ranks_per_node > 1
    if needs_check and not is_builtin(balancer):
        try:
            call.compare({"the balancer's result": _fingerprint(chosen)})
        except MismatchError as error:
            raise MismatchError(
                f"{error}. A balancer must be pure, and the same on all ranks: equal traffic, equal groups or lanes"
            ) from None
    lanes = traffic.lanes_of(chosen)
    for verb, rows in (("sends", lanes.sent_rows), ("receives", lanes.received_rows)):
        if (most := int(rows.max())) > max_rows:
            raise ValueError(
                f"by the balancer's lanes rank {topology.numbers[rows.argmax()]} {verb} {most} rows between nodes, but "
                f"it has memory for {max_rows}, max_tokens_per_rank for each other node"
            )
    return lanes


def _fingerprint(chosen: Groups | Lanes) -> str:
    """Return a text that does not depend on the order of groups: the groups if they are few, else a hash.

    >>> from fusco.core.topology import Topology
    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> _fingerprint(Groups(topology, ((1, 0), (0, 1)))), _fingerprint(Groups(topology, ((0, 1), (1, 0))))
    ('((0, 1), (1, 0))', '((0, 1), (1, 0))')
    """
    if isinstance(chosen, Lanes):
        text = "lanes " + str([column.tolist() for column in chosen.runs])
    else:
        text = str(tuple(sorted(tuple(map(int, members)) for members in chosen.group_to_locals)))
    return text if len(text) <= _MAX_CHARS else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class PublishedRows(NamedTuple):
    """Numbers of rows that a rank dispatches, as other ranks need them."""

    num_tokens: int  # of the rank
    # tokens for each other node; empty if there is one node, or with an earlier plan
    num_rows_to_node: tuple[int, ...] = ()

    def pack(self) -> tuple[int, ...]:
        """Return the counts of a record."""
        return (self.num_tokens, *self.num_rows_to_node)

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(counts: tuple[int, ...]) -> PublishedRows:
        """Return the inverse of ``pack``."""
        return PublishedRows(counts[0], counts[1:])

"""Communication groups of a dispatch, and the check that all ranks computed the same."""

from __future__ import annotations

import hashlib

from fusco.core.errors import MismatchError
from fusco.core.groups import Groups
from fusco.core.profile import Call
from fusco.planner.balancer import Balancer, Traffic, is_of_fusco

_MAX_CHARS = 48  # of groups that are spelled out in an error; a record's text is short


def agreed_groups(call: Call, balancer: Balancer, traffic: Traffic) -> Groups:
    """Compute groups from traffic that all ranks know; ``MismatchError``, on all of them, if they come to others.

    Only a balancer of the caller's may give different groups on different ranks, so only for one do ranks exchange
    records once more: before anything travels by groups, as rows for the wrong forwarder would wait for the limit.
    That takes 0.6 to 2.7 ms (medians; four ranks on two busy cores, loopback). Within one node nothing depends on
    groups, and nodes of one rank have but one group.
    """
    groups, topology = balancer(traffic), traffic.topology
    is_open = topology.num_nodes > 1 and topology.ranks_per_node > 1
    if is_open and not is_of_fusco(balancer):
        try:
            call.compare({"the balancer's groups": _fingerprint(groups)})
        except MismatchError as error:
            raise MismatchError(
                f"{error}. A balancer must be pure, and the same on all ranks: equal traffic, equal groups"
            ) from None
    return groups


def _fingerprint(groups: Groups) -> str:
    """The groups, in whatever order they are numbered: spelled out if they are few, else by a hash.

    >>> from fusco.core.topology import Topology
    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> _fingerprint(Groups(topology, ((1, 0), (0, 1)))), _fingerprint(Groups(topology, ((0, 1), (1, 0))))
    ('((0, 1), (1, 0))', '((0, 1), (1, 0))')
    """
    text = str(tuple(sorted(tuple(map(int, members)) for members in groups.group_to_locals)))
    return text if len(text) <= _MAX_CHARS else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

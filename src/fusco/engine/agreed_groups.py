"""Communication groups of a dispatch, with a check that all ranks computed the same ones."""

from __future__ import annotations

import hashlib

from fusco.core.errors import MismatchError
from fusco.core.groups import Groups
from fusco.core.profile import Call
from fusco.planner.balancer import Balancer, Traffic, is_builtin

_MAX_CHARS = 48  # longest text of groups in an error, since the text of a record is short


def agreed_groups(call: Call, balancer: Balancer, traffic: Traffic) -> Groups:
    """Compute groups from traffic that all ranks know; ``MismatchError`` on all ranks if their groups differ.

    Only a user-defined balancer may return different groups on different ranks. So only with such a balancer do ranks
    exchange records once more, before any rows are sent: rows for the wrong forwarder would end in a timeout. That
    takes 0.6 to 2.7 ms (medians; four ranks on two busy cores, loopback). Within one node nothing depends on groups,
    and nodes of one rank have only one group.
    """
    groups, topology = balancer(traffic), traffic.topology
    needs_check = topology.num_nodes > 1 and topology.ranks_per_node > 1
    if needs_check and not is_builtin(balancer):
        try:
            call.compare({"the balancer's result": _fingerprint(groups)})
        except MismatchError as error:
            raise MismatchError(
                f"{error}. A balancer must be pure, and the same on all ranks: equal traffic, equal groups"
            ) from None
    return groups


def _fingerprint(groups: Groups) -> str:
    """Return a text that does not depend on the order of groups: the groups if they are few, else a hash.

    >>> from fusco.core.topology import Topology
    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> _fingerprint(Groups(topology, ((1, 0), (0, 1)))), _fingerprint(Groups(topology, ((0, 1), (1, 0))))
    ('((0, 1), (1, 0))', '((0, 1), (1, 0))')
    """
    text = str(tuple(sorted(tuple(map(int, members)) for members in groups.group_to_locals)))
    return text if len(text) <= _MAX_CHARS else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

"""The balancer that divides a node's rows among all its links, sent and received: lanes.

A balancer of groups chooses who receives; who sends is still the rank that has the rows. Here a rank whose link would
be the last to finish hands rows to ranks of its node with room, which send them. Sources: FUSCO section 3.4 for
forwarders, FAST section 4.1 for balancing within a node, FuseLink for the NICs of other ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.core.lanes import Lanes, Runs
from fusco.planner.traffic import Traffic
from fusco.schedule.lanes import even_out

# A link may carry 1/128 more than its share: the last rows would cost a message more than they save. Below 1/64, or
# 32 rows (5 us at 50 GB/s), nothing is divided at all.
_SLACK = 128
_LEAST_GAIN = 64
_LEAST_ROWS = 32
_NO_LIMIT = np.iinfo(np.int64).max
_SRC, _NODE, _FIRST, _END, _CARRIER, _FORWARDER = range(6)


def balance_lanes(traffic: Traffic) -> Lanes:
    """Divide the rows between nodes among the links of each node.

    Step 1: the *bound* is the share of a link in the busiest node, sent or received. Where every rank is close to it
    with groups of equal local ranks, these are the result. Step 2: a rank with more than the bound hands the surplus to
    ranks of its node with room, which is the minimum that must move. It keeps the rows for the nodes after its own
    node; a source's rows are cut into contiguous runs. Step 3: a carrier sends to its counterpart on the other node,
    except for what would take that above the bound.

    Rank 0 has 80 rows for node 1, rank 1 none: rank 1 sends 40 of them.

    >>> from fusco.core.topology import Topology
    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> lanes = balance_lanes(Traffic.from_counts(topology, [[0, 80], [0, 0], [40, 0], [40, 0]]))
    >>> [tuple(map(int, run)) for run in zip(*lanes.runs)]
    [(0, 1, 0, 40, 0, 2), (0, 1, 40, 80, 1, 3), (2, 0, 0, 40, 2, 0), (3, 0, 0, 40, 3, 1)]
    """
    table = _divide(traffic.num_rows, traffic.num_links)
    ranks = np.array(traffic.topology.node_to_ranks).ravel()
    for column in (_SRC, _CARRIER, _FORWARDER):
        table[:, column] = ranks[table[:, column]]
    return Lanes(traffic.topology, Runs(*np.ascontiguousarray(table.T)))


@compiled()
def most_of_link(share: int) -> int:
    """Return the rows that a link may carry if ``share`` is its part of those of the busiest node."""
    return share + share // _SLACK


@compiled()
def _share(num_rows: Any, num_links: Any) -> int:
    """Return the rows of a link in the busiest node, sent or received, rounded up."""
    num_nodes, share = num_rows.shape[0], 0
    for node in range(num_nodes):
        links, sent, received = num_links[node].sum(), num_rows[node].sum(), num_rows[:, :, node].sum()
        share = max(share, -(-max(sent, received) // links))
    return share


@compiled()
def _is_worth_it(num_rows: Any, num_links: Any, share: int) -> bool:
    """Return whether any link of the plain lanes has much more than its share."""
    num_nodes, num_locals, _ = num_rows.shape
    for node in range(num_nodes):
        for local in range(num_locals):
            load = max(num_rows[node, local].sum(), num_rows[:, local, node].sum())
            excess = load - share * num_links[node, local]
            if excess >= _LEAST_ROWS and excess * _LEAST_GAIN > share * num_links[node, local]:
                return True
    return False


@compiled()
def _divide(num_rows: Any, num_links: Any) -> Any:
    """Return the runs, int64 (num_runs, 6), in the order of ``Lanes``, with ranks as node * ranks_per_node + local."""
    num_nodes, num_locals, _ = num_rows.shape
    share = _share(num_rows, num_links)
    limits = num_links * most_of_link(share)
    if not _is_worth_it(num_rows, num_links, share):
        limits[:] = _NO_LIMIT  # every rank keeps what it has
    moved = np.zeros((num_nodes, num_locals, num_locals), np.int64)
    sent = np.zeros((num_nodes, num_locals, num_nodes), np.int64)  # by carrier
    for node in range(num_nodes):
        even_out(num_rows[node].sum(axis=1), limits[node], moved[node])
    pieces = _cut_sends(num_rows, moved, sent)
    for node in range(num_nodes):
        even_out(sent[:, :, node].sum(axis=0), limits[node], moved[node])
    return _cut_receives(pieces, moved)


@compiled()
def _cut_sends(num_rows: Any, moved: Any, sent: Any) -> Any:
    """Cut each source's rows among carriers, ``moved[node, source, carrier]`` each; count them in ``sent``."""
    num_nodes, num_locals, _ = num_rows.shape
    pieces = np.empty((num_nodes * num_locals * (num_nodes + 1), 6), np.int64)
    keys = np.empty(len(pieces), np.int64)
    count = 0
    for node in range(num_nodes):
        for src in range(num_locals):
            step, first = 1, 0
            for i in range(num_locals):
                carrier = src if i == 0 else i - 1 if i <= src else i  # itself, then the others
                left = moved[node, src, carrier]
                while left > 0:
                    dst = (node + step) % num_nodes
                    size = min(left, num_rows[node, src, dst] - first)
                    if size > 0:
                        piece = pieces[count]
                        piece[_SRC], piece[_NODE] = node * num_locals + src, dst
                        piece[_FIRST], piece[_END] = first, first + size
                        piece[_CARRIER] = node * num_locals + carrier
                        keys[count] = (piece[_CARRIER] * num_nodes + dst) * 2 + (carrier != src)
                        sent[node, carrier, dst] += size
                        count += 1
                    first += size
                    left -= size
                    if first == num_rows[node, src, dst]:
                        step, first = step + 1, 0
    return pieces[np.argsort(keys[:count], kind="mergesort")]


@compiled()
def _cut_receives(pieces: Any, moved: Any) -> Any:
    """Cut pieces among forwarders: ``moved[node, counterpart, forwarder]`` rows of those for a counterpart each."""
    num_nodes, num_locals, _ = moved.shape
    runs = np.empty((len(pieces) + num_nodes * num_locals, 6), np.int64)
    count = 0
    for piece in pieces:
        node, counterpart, first = piece[_NODE], piece[_CARRIER] % num_locals, piece[_FIRST]
        quotas = moved[node, counterpart]
        for i in range(num_locals):
            forwarder = counterpart if i == 0 else i - 1 if i <= counterpart else i
            size = min(quotas[forwarder], piece[_END] - first)
            if size > 0:
                runs[count] = piece
                runs[count, _FIRST], runs[count, _END] = first, first + size
                runs[count, _FORWARDER] = node * num_locals + forwarder
                count += 1
                quotas[forwarder] -= size
                first += size
    return runs[:count]

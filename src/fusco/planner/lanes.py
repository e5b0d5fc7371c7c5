"""The balancer that divides a node's rows among all its links, sent and received: lanes.

A balancer of groups chooses who receives; who sends is still the rank that has the rows. Here a rank whose link would
be the last to finish hands rows to ranks of its node with room, which send them. Sources: FUSCO section 3.4 for
forwarders, FAST section 4.1 for balancing within a node, FuseLink for the NICs of other ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray, Lanes, Runs
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
    return DividedLanes(traffic, *_quotas(traffic.num_rows, traffic.num_links))


class DividedLanes(Lanes):
    """Lanes of which it is known how many rows ranks hand to each other; runs are cut when they are first asked for.

    Attributes:
        handed: int64 (num_nodes, ranks_per_node, ranks_per_node), rows of a local rank that another one sends.
        taken: of the same shape, rows that senders have for a local rank, their counterpart, and another one receives.
    """

    handed: IntArray
    taken: IntArray
    _traffic: Traffic

    def __init__(self, traffic: Traffic, handed: IntArray, taken: IntArray) -> None:
        self.__dict__.update(topology=traffic.topology, handed=handed, taken=taken, _traffic=traffic)

    @cached_property
    def runs(self) -> Runs:
        """As of all lanes."""
        table, ranks = _cut(self._traffic.num_rows, self.handed, self.taken), self._ranks.ravel()
        for column in (_SRC, _CARRIER, _FORWARDER):
            table[:, column] = ranks[table[:, column]]
        return Runs(*np.ascontiguousarray(table.T))

    @cached_property
    def _ranks(self) -> IntArray:
        return np.array(self.topology.node_to_ranks)

    @cached_property
    def num_moved(self) -> int:
        """Rows that another rank than their source sends."""
        return int(self.handed.sum() - self.handed.trace(axis1=1, axis2=2).sum())

    def _sums(self, quotas: IntArray) -> IntArray:
        by_rank = np.empty(self.topology.world_size, np.int64)
        by_rank[self._ranks] = quotas.sum(axis=1)
        return by_rank

    @cached_property
    def sent_rows(self) -> IntArray:
        """Rows that each rank sends to other nodes, int64 (world_size,)."""
        return self._sums(self.handed)

    @cached_property
    def received_rows(self) -> IntArray:
        """Rows that each rank receives from other nodes, int64 (world_size,)."""
        return self._sums(self.taken)


@compiled()
def most_of_link(share: int) -> int:
    """Return the rows that a link may carry if ``share`` is its part of those of the busiest node."""
    return share + share // _SLACK


@compiled()
def _share(sent: Any, received: Any, num_links: Any) -> int:
    """Return the rows of a link in the busiest node, sent or received, rounded up."""
    share = 0
    for node in range(len(sent)):
        share = max(share, -(-max(sent[node].sum(), received[node].sum()) // num_links[node].sum()))
    return share


@compiled()
def _is_worth_it(sent: Any, received: Any, num_links: Any, share: int) -> bool:
    """Return whether any link of the plain lanes has much more than its share."""
    num_nodes, num_locals = sent.shape
    for node in range(num_nodes):
        for local in range(num_locals):
            excess = max(sent[node, local], received[node, local]) - share * num_links[node, local]
            if excess >= _LEAST_ROWS and excess * _LEAST_GAIN > share * num_links[node, local]:
                return True
    return False


@compiled()
def _quotas(num_rows: Any, num_links: Any) -> Any:
    """Return what ranks of a node hand to each other to send, and what they take: ``handed`` and ``taken``."""
    num_nodes, num_locals, _ = num_rows.shape
    sent, received = np.zeros((num_nodes, num_locals), np.int64), np.zeros((num_nodes, num_locals), np.int64)
    for node in range(num_nodes):
        for local in range(num_locals):
            for dst in range(num_nodes):
                sent[node, local] += num_rows[node, local, dst]
                received[dst, local] += num_rows[node, local, dst]
    share = _share(sent, received, num_links)
    limits = num_links * most_of_link(share)
    if not _is_worth_it(sent, received, num_links, share):
        limits[:] = _NO_LIMIT  # every rank keeps what it has
    handed = np.zeros((num_nodes, num_locals, num_locals), np.int64)
    taken = np.zeros((num_nodes, num_locals, num_locals), np.int64)
    for node in range(num_nodes):
        even_out(sent[node], limits[node], handed[node])
    _cut_sends(num_rows, handed, received, np.empty((0, 6), np.int64), np.empty(0, np.int64))
    for node in range(num_nodes):
        even_out(received[node], limits[node], taken[node])
    return handed, taken


@compiled()
def _cut(num_rows: Any, handed: Any, taken: Any) -> Any:
    """Return the runs, int64 (num_runs, 6), in the order of ``Lanes``, with ranks as node * ranks_per_node + local."""
    num_nodes, num_locals, _ = num_rows.shape
    pieces = np.empty((num_nodes * num_locals * (num_nodes + 1), 6), np.int64)
    keys = np.empty(len(pieces), np.int64)
    count = _cut_sends(num_rows, handed, np.empty((num_nodes, num_locals), np.int64), pieces, keys)
    return _cut_receives(pieces[np.argsort(keys[:count], kind="mergesort")], taken.copy())


@compiled()
def _cut_sends(num_rows: Any, handed: Any, received: Any, pieces: Any, keys: Any) -> int:
    """Cut each source's rows among carriers, ``handed[node, source, carrier]`` each; returns the number of pieces.

    ``received`` (num_nodes, ranks_per_node) is set to the rows for each carrier's counterpart. ``pieces``, and
    ``keys`` by which they are in order, may be empty: then they are not written.
    """
    num_nodes, num_locals, _ = num_rows.shape
    received[:] = 0
    count = 0
    for node in range(num_nodes):
        for src in range(num_locals):
            step, first = 1, 0
            for i in range(num_locals):
                carrier = src if i == 0 else i - 1 if i <= src else i  # itself, then the others
                left = handed[node, src, carrier]
                while left > 0:
                    dst = (node + step) % num_nodes
                    size = min(left, num_rows[node, src, dst] - first)
                    if size > 0:
                        if len(pieces):
                            piece = pieces[count]
                            piece[_SRC], piece[_NODE] = node * num_locals + src, dst
                            piece[_FIRST], piece[_END] = first, first + size
                            piece[_CARRIER] = node * num_locals + carrier
                            keys[count] = (piece[_CARRIER] * num_nodes + dst) * 2 + (carrier != src)
                        received[dst, carrier] += size
                        count += 1
                    first += size
                    left -= size
                    if first == num_rows[node, src, dst]:
                        step, first = step + 1, 0
    return count


@compiled()
def _cut_receives(pieces: Any, taken: Any) -> Any:
    """Cut pieces among forwarders: ``taken[node, counterpart, forwarder]`` rows of those for a counterpart each."""
    num_nodes, num_locals, _ = taken.shape
    runs = np.empty((len(pieces) + num_nodes * num_locals, 6), np.int64)
    count = 0
    for piece in pieces:
        node, counterpart, first = piece[_NODE], piece[_CARRIER] % num_locals, piece[_FIRST]
        quotas = taken[node, counterpart]
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

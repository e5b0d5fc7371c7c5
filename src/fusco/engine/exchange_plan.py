"""How an all-to-all begins, whatever the device: ranks tell each other their sizes, and all make the same schedule."""

from __future__ import annotations

import numpy as np

from fusco.control.fingerprint import Agreement
from fusco.control.session import Rounds
from fusco.core.topology import Topology
from fusco.engine.base import ExchangeOrder
from fusco.engine.byte_stream import check_sizes
from fusco.schedule.choice import schedule_for
from fusco.schedule.cost import Links
from fusco.schedule.itinerary import Itinerary, make_itinerary


def agree_on_exchange(
    rounds: Rounds,
    agreement: Agreement,
    order: ExchangeOrder | None,
    topology: Topology,
    rank: int,
    links: Links,
) -> Itinerary | None:
    """Publish what this rank exchanges, and say what it does; ``None`` if its input was refused.

    Args:
        rounds: of the engine.
        agreement: as for every collective.
        order: ``None`` if the input was refused.
        topology: which ranks share a node.
        rank: this rank.
        links: by which a schedule is chosen unless the order names one.

    Raises:
        MismatchError: on all ranks, unless everybody expects what the others send.

    """
    world_size = topology.world_size
    if order is None or agreement.rejection:
        rounds.publish(agreement, [0] * (2 * world_size))
        return None
    with rounds.profile.spend("planning"):
        records = rounds.publish(agreement, [*order.send_rows, *order.receive_rows])
        check_sizes(records, world_size, "rows")
        rank_rows = np.array([record.counts[:world_size] for record in records], dtype=np.int64)
        schedule = schedule_for(rank_rows * order.row_bytes, topology, links, order.mode)
        return make_itinerary(schedule, rank)

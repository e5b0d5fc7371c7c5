"""A schedule in the mode that should take less."""

from __future__ import annotations

import numpy as np

from fusco.core.topology import Topology
from fusco.schedule.cost import Links, choose_mode
from fusco.schedule.schedule import Schedule, ScheduleMode, make_schedule
from fusco.schedule.stages import IntArray


def schedule_for(rank_bytes: IntArray, topology: Topology, links: Links, mode: ScheduleMode | None = None) -> Schedule:
    """``make_schedule`` in a given mode, or, for ``None``, in the one that ``choose_mode`` picks for these links."""
    if mode is None:
        node = np.array(topology.rank_to_node)
        node_bytes = np.zeros((topology.num_nodes, topology.num_nodes), np.int64)
        np.add.at(node_bytes, (node[:, None], node), rank_bytes)
        mode = choose_mode(node_bytes, topology.ranks_per_node, links)
    return make_schedule(rank_bytes, topology, mode=mode)

"""Cost model of schedules, and the choice of the faster mode.

In the model, a stage takes a fixed latency (its synchronisation) plus its bytes over the bandwidth of its lanes.
Transfers within a node take the busiest rank's bytes over its bandwidth. 1 GB/s is 1000 bytes a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray
from fusco.core.topology import ScheduleMode, Topology
from fusco.schedule.decomposition import Mode
from fusco.schedule.few import budget_bytes
from fusco.schedule.schedule import Schedule, make_schedule
from fusco.schedule.stages import Stages, Transfers, as_node_bytes, lower_bound_bytes

_BYTES_PER_US_AND_GBS = 1000.0
# The usual number of stages per node of mode "few": 1 to 2.5 on the matrices of docs/performance/schedule.md.
_USUAL_FEW_STAGES_PER_NODE = 2


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links of a rank: latency of a stage in us, bandwidth in each direction in GB/s, between and within nodes.

    The defaults are FAST's testbed (section 5: 400 Gbit/s between nodes, 450 GB/s within); 10 us is twice the time of a
    small message and its completion over RDMA from the GPU. ``lane_links`` as in ``make_schedule``.
    """

    latency_us: float = 10.0
    internode_gbs: float = 50.0
    intranode_gbs: float = 450.0
    lane_links: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.latency_us >= 0:
            raise ValueError(f"latency_us must not be negative, got {self.latency_us}")
        for name in ("internode_gbs", "intranode_gbs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, got {getattr(self, name)}")

    def internode_us(self, num_bytes: float) -> float:
        """Return the time of a rank's bytes between nodes, without latency."""
        return num_bytes / (self.internode_gbs * _BYTES_PER_US_AND_GBS)

    def intranode_us(self, num_bytes: float) -> float:
        """Return the time of a rank's bytes within its node."""
        return num_bytes / (self.intranode_gbs * _BYTES_PER_US_AND_GBS)


# Links by which the all-to-all of each engine chooses a schedule, unless the caller names a mode.
# CPU: TCP over 10 Gbit/s or a loopback device. A stage costs the latency of its first message through Python, as it was
# measured over gloo (docs/performance/alltoall.md); not measured over the present transport.
CPU_LINKS = Links(latency_us=200.0, internode_gbs=1.0, intranode_gbs=4.0)
# CUDA: the cost to launch and connect a round of messages, a NIC of 200 Gbit/s for each rank, NVLink. Not
# measured (c56ea98).
CUDA_LINKS = Links(latency_us=30.0, internode_gbs=25.0, intranode_gbs=300.0)


def stages_us(stages: Stages, ranks_per_node: int, links: Links) -> float:
    """Return the time of all stages, one after the other; the ranks of a node share its bytes evenly.

    >>> stages = Stages(np.array([[1, 0]]), np.array([[800, 400]]), np.array([800]))
    >>> stages_us(stages, ranks_per_node=2, links=Links(latency_us=5, internode_gbs=0.1))
    9.0
    """
    check_integer("ranks_per_node", ranks_per_node, least=1)
    return stages.num_stages * links.latency_us + links.internode_us(stages.total_bytes / ranks_per_node)


def choose_mode(node_bytes: Any, ranks_per_node: int, links: Links) -> Mode:
    """Return the mode that should take less time. It follows from the size of the matrix; nothing is decomposed.

    Exact stages save at most 2 % of the bytes. There are about as many as pairs of nodes that exchange anything, at
    most ``N**2 - 2 * N + 2``; in mode ``"few"`` there are about two per node. So the exact mode pays off if
    ``latency_us * (exact - few stages) < time of 2 % of the lower bound``. Takes the same matrices as ``decompose``,
    with the same errors.

    >>> uniform = np.full((8, 8), 10**6)
    >>> [choose_mode(uniform * size, 8, Links()) for size in (1, 1000)]
    ['few', 'exact']
    """
    check_integer("ranks_per_node", ranks_per_node, least=1)
    node_bytes = as_node_bytes(node_bytes)
    num_nodes = len(node_bytes)
    bound = lower_bound_bytes(node_bytes)
    num_pairs = int(np.count_nonzero(node_bytes)) - int(np.count_nonzero(np.diagonal(node_bytes)))
    num_exact = min(num_nodes * num_nodes - 2 * num_nodes + 2, num_pairs)
    num_saved = num_exact - _USUAL_FEW_STAGES_PER_NODE * num_nodes
    lost_us = links.internode_us((int(budget_bytes(bound)) - bound) / ranks_per_node)
    return "exact" if num_saved * links.latency_us <= lost_us else "few"


def schedule_for(rank_bytes: IntArray, topology: Topology, links: Links, mode: ScheduleMode | None = None) -> Schedule:
    """Run ``make_schedule`` in the given mode; ``None`` means the mode that ``choose_mode`` picks for these links."""
    if mode is None:
        node = np.array(topology.rank_to_node)
        node_bytes = np.zeros((topology.num_nodes, topology.num_nodes), np.int64)
        np.add.at(node_bytes, (node[:, None], node), rank_bytes)
        mode = choose_mode(node_bytes, topology.ranks_per_node, links)
    return make_schedule(rank_bytes, topology, mode=mode, lane_links=links.lane_links)


def are_lanes_worth_it(
    rank_bytes: IntArray, topology: Topology, slice_bytes: int, lane_links: tuple[int, ...] | None = None
) -> bool:
    """Return whether ranks send so unequally to other nodes that a schedule with lanes pays for its copies.

    A rank must have more than 1/8, and a slice, above its share in the busiest node.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> uneven = np.array([[0, 9, 50, 50], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    >>> [are_lanes_worth_it(uneven * scale, topology, slice_bytes=1000) for scale in (1, 100)]
    [False, True]
    """
    nodes = np.array(topology.rank_to_node)
    crossing = np.where(nodes[:, None] != nodes, rank_bytes, 0)
    loads = np.stack((crossing.sum(axis=1), crossing.sum(axis=0)))[:, np.array(topology.node_to_ranks)]
    links = np.array(lane_links or (1,) * topology.ranks_per_node)
    share = loads.sum(axis=2).max() * (links / links.sum())
    return bool((loads > np.maximum(share * 9 / 8, share + slice_bytes)).any())


def schedule_us(schedule: Schedule, links: Links) -> float:
    """Return the time of a whole schedule, pipelined as in FAST's Fig. 11.

    Balancing comes first, then the stages one after the other. The local messages run concurrently with the first
    stage. The redistribution of a stage begins when the stage and the earlier transfers within nodes are complete.
    """
    num_ranks, stages = schedule.topology.world_size, schedule.stages
    crossed_us = _within_us(schedule.balancing, num_ranks, links)
    within_us = crossed_us + _within_us(schedule.local, num_ranks, links)
    longest_lane = -(-stages.duration_bytes // schedule.topology.ranks_per_node)
    first = np.searchsorted(schedule.redistribution.stage, np.arange(stages.num_stages + 1))  # it is in order of stages
    for stage, lane_bytes in enumerate(longest_lane.tolist()):
        arrived = schedule.redistribution.select(np.arange(first[stage], first[stage + 1]))
        crossed_us += links.latency_us + links.internode_us(lane_bytes)
        within_us = max(within_us, crossed_us) + _within_us(arrived, num_ranks, links)
    return max(crossed_us, within_us)


def _within_us(transfers: Transfers, num_ranks: int, links: Links) -> float:
    return links.intranode_us(int(transfers.load(num_ranks).max(initial=0)))

"""What a schedule takes by a simple model of the links, and the mode that takes less.

The model: a stage takes a fixed latency (its synchronisation) and its bytes over the bandwidth of its lanes; within
nodes, the busiest rank's bytes over its bandwidth. 1 GB/s is 1000 bytes a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fusco.core.integers import check_integer
from fusco.schedule.decomposition import Mode
from fusco.schedule.few import budget_bytes
from fusco.schedule.matrix import as_node_bytes
from fusco.schedule.schedule import Schedule
from fusco.schedule.stages import Stages, lower_bound_bytes
from fusco.schedule.transfers import Transfers

_BYTES_PER_US_AND_GBS = 1000.0
# The usual number of stages a node of mode "few": 1 to 2.5 on the matrices of docs/performance/schedule.md.
_USUAL_FEW_STAGES_PER_NODE = 2


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a rank: latency of a stage in us, bandwidth each way in GB/s, between and within nodes.

    The defaults are FAST's testbed (section 5: 400 Gbit/s between, 450 GB/s within nodes); 10 us is a small message and
    its completion over RDMA from the GPU, twice.
    """

    latency_us: float = 10.0
    internode_gbs: float = 50.0
    intranode_gbs: float = 450.0

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and self.internode_gbs > 0 and self.intranode_gbs > 0):
            raise ValueError(f"latency must not be negative and bandwidths must be above zero, got {self}")

    def internode_us(self, num_bytes: float) -> float:
        """Time of a rank's bytes between nodes, without latency."""
        return num_bytes / (self.internode_gbs * _BYTES_PER_US_AND_GBS)

    def intranode_us(self, num_bytes: float) -> float:
        """Time of a rank's bytes within its node."""
        return num_bytes / (self.intranode_gbs * _BYTES_PER_US_AND_GBS)


# The links that backends choose a schedule by, unless it is given.
# CPU: gloo over 10 Gbit/s or a loopback device, where a stage costs the way of its first message through Python and TCP
# (measured in docs/performance/alltoall.md).
GLOO_LINKS = Links(latency_us=200.0, internode_gbs=1.0, intranode_gbs=4.0)
# CUDA: the cost of launching and connecting a round of messages, a NIC of 200 Gbit/s per rank, NVLink. Not measured
# (c56ea98).
NCCL_LINKS = Links(latency_us=30.0, internode_gbs=25.0, intranode_gbs=300.0)


def stages_us(stages: Stages, ranks_per_node: int, links: Links) -> float:
    """Time of all stages one after the other, each node's bytes shared by its ranks.

    >>> stages = Stages(np.array([[1, 0]]), np.array([[800, 400]]), np.array([800]))
    >>> stages_us(stages, ranks_per_node=2, links=Links(latency_us=5, internode_gbs=0.1))
    9.0
    """
    check_integer("ranks_per_node", ranks_per_node, least=1)
    return stages.num_stages * links.latency_us + links.internode_us(stages.total_bytes / ranks_per_node)


def choose_mode(node_bytes: Any, ranks_per_node: int, links: Links) -> Mode:
    """The mode that should take less, from the size of the matrix alone; nothing is decomposed.

    Exact stages save 2 % of the bytes at most and are about as many as pairs of nodes that exchange anything, at most
    ``N**2 - 2 * N + 2``; few ones are about two a node. So the exact mode is worth it if
    ``latency_us * (exact - few stages) < time of 2 % of the lower bound``. Takes matrices, and raises, as
    ``decompose``.

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


def schedule_us(schedule: Schedule, links: Links) -> float:
    """Time of a whole schedule, pipelined as in FAST's Fig. 11.

    Balancing first; then the stages, one after the other; each stage's redistribution as soon as the stage and what is
    on the links within nodes before it are done; the local messages beside the first stage.
    """
    num_ranks, stages = schedule.topology.world_size, schedule.stages
    crossed_us = _within_us(schedule.balancing, num_ranks, links)
    within_us = crossed_us + _within_us(schedule.local, num_ranks, links)
    redistribution_us = _redistribution_us(schedule, links)
    longest_lane = -(-stages.duration_bytes // schedule.topology.ranks_per_node)
    for lane_bytes, handing_on_us in zip(longest_lane.tolist(), redistribution_us, strict=True):
        crossed_us += links.latency_us + links.internode_us(lane_bytes)
        within_us = max(within_us, crossed_us) + handing_on_us
    return max(crossed_us, within_us)


def _within_us(transfers: Transfers, num_ranks: int, links: Links) -> float:
    return links.intranode_us(int(transfers.load(num_ranks).max(initial=0)))


def _redistribution_us(schedule: Schedule, links: Links) -> list[float]:
    """Of each stage: what the busiest rank sends or receives within its node."""
    transfers, num_ranks = schedule.redistribution, schedule.topology.world_size
    loads = np.zeros((2, schedule.stages.num_stages, num_ranks), np.int64)
    np.add.at(loads[0], (transfers.stage, transfers.from_rank), transfers.num_bytes)
    np.add.at(loads[1], (transfers.stage, transfers.to_rank), transfers.num_bytes)
    return [links.intranode_us(size) for size in loads.max(axis=(0, 2)).tolist()]

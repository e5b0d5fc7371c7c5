"""What the links of this run can do: the peaks that measured times are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from fusco.topology import Topology

_NUM_BYTES = 16 << 20
_NUM_REPEATS = 5


@dataclass(frozen=True)
class LinkPeaks:
    """Bandwidths with all ranks at work at once, in 10^9 bytes a second and rank.

    Attributes:
        internode_gbs: received over torch.distributed point-to-point while sending as much; 0 with one node.
        copy_gbs: written by a plain memory copy.

    """

    internode_gbs: float
    copy_gbs: float


def measure_links(group: dist.ProcessGroup, topology: Topology) -> LinkPeaks:
    """Measure, together with all ranks of the group."""
    rank = dist.get_rank(group)
    source, target = torch.ones(_NUM_BYTES, dtype=torch.uint8), torch.zeros(_NUM_BYTES, dtype=torch.uint8)

    def exchange() -> None:
        # A ring over nodes between ranks of the same local rank.
        node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
        following = topology.node_to_ranks[(node + 1) % topology.num_nodes][local]
        preceding = topology.node_to_ranks[(node - 1) % topology.num_nodes][local]
        receive = dist.irecv(target, group=group, group_src=preceding)
        send = dist.isend(source, group=group, group_dst=following)
        for work in (receive, send):
            assert work is not None
            work.wait()

    return LinkPeaks(
        internode_gbs=_bandwidth_gbs(exchange, group) if topology.num_nodes > 1 else 0.0,
        copy_gbs=_bandwidth_gbs(lambda: target.copy_(source), group),
    )


def _bandwidth_gbs(work: Callable[[], object], group: dist.ProcessGroup) -> float:
    seconds = []
    for _ in range(_NUM_REPEATS):
        dist.barrier(group)
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return _NUM_BYTES / median(seconds) / 1e9

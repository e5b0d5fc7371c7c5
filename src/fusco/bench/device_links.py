"""Peak bandwidths of the links between this run's GPUs, with all ranks sending at once.

Within a node by copy engine and by multiprocessors, between nodes by NCCL send and receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from fusco.bench.links import NUM_BYTES, InternodePeaks, measure_between_nodes
from fusco.bench.stopwatch import RankTimer
from fusco.core.topology import Topology

_NUM_BYTES = 256 << 20
_NUM_REPEATS = 10


@dataclass(frozen=True)
class DevicePeaks:
    """Bandwidths in 10^9 bytes per second and rank; every rank sends to the next one, so links carry both directions.

    ``copy_engine`` is a plain device-to-device copy, ``sm`` an elementwise kernel. ``push`` writes to the peer,
    ``pull`` reads from it. These four are zeros unless there is one node of several ranks. ``local_gbs`` counts
    bytes read and written.
    """

    copy_engine_push_gbs: float = 0.0
    copy_engine_pull_gbs: float = 0.0
    sm_push_gbs: float = 0.0
    sm_pull_gbs: float = 0.0
    local_gbs: float = 0.0
    internode: InternodePeaks = field(default_factory=InternodePeaks)


def measure_device_links(group: dist.ProcessGroup, topology: Topology, timer: RankTimer) -> DevicePeaks:
    """Measure all links; a collective of the group."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    local = torch.ones(_NUM_BYTES // 4, dtype=torch.int32, device="cuda")
    other = torch.empty_like(local)

    def gbs(work: Callable[[], object]) -> float:
        return round(_NUM_BYTES / 1e6 / timer.median_ms(work, _NUM_REPEATS), 1)

    local_gbs = 2 * gbs(lambda: other.copy_(local))
    if topology.num_nodes > 1:
        parts = (tensor.view(torch.uint8)[: NUM_BYTES["cuda"]] for tensor in (local, other))
        return DevicePeaks(local_gbs=local_gbs, internode=measure_between_nodes(group, topology, timer, *parts))
    if num_ranks == 1:
        return DevicePeaks(local_gbs=local_gbs)
    visible = symm_mem.empty(local.numel(), dtype=torch.int32, device=local.device)
    peer = symm_mem.rendezvous(visible, group).get_buffer((rank + 1) % num_ranks, visible.shape, torch.int32)
    return DevicePeaks(
        copy_engine_push_gbs=gbs(lambda: peer.copy_(local)),
        copy_engine_pull_gbs=gbs(lambda: local.copy_(peer)),
        sm_push_gbs=gbs(lambda: torch.neg(local, out=peer)),
        sm_pull_gbs=gbs(lambda: torch.neg(peer, out=local)),
        local_gbs=local_gbs,
    )

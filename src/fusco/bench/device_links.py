"""What the links between this run's GPUs can do, by copy engine and by multiprocessors, all ranks at work at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from fusco.bench.stopwatch import Stopwatch

_NUM_BYTES = 256 << 20
_NUM_REPEATS = 10


@dataclass(frozen=True)
class DevicePeaks:
    """Bandwidths in 10^9 bytes a second and rank; every rank talks to the next one, so each link carries both ways.

    ``copy_engine`` is a plain device-to-device copy, ``sm`` an elementwise kernel; to ``push`` is to write to the peer,
    to ``pull`` to read from it. ``local_gbs`` counts bytes read and written. Zeros with a single rank.
    """

    copy_engine_push_gbs: float = 0.0
    copy_engine_pull_gbs: float = 0.0
    sm_push_gbs: float = 0.0
    sm_pull_gbs: float = 0.0
    local_gbs: float = 0.0


def measure_device_links(group: dist.ProcessGroup, stopwatch: Stopwatch) -> DevicePeaks:
    """Measure, together with all ranks of the group."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    own = torch.ones(_NUM_BYTES // 4, dtype=torch.int32, device="cuda")
    other = torch.empty_like(own)

    def gbs(work: object) -> float:
        assert callable(work)
        return round(_NUM_BYTES / 1e6 / stopwatch.median_ms(work, _NUM_REPEATS), 1)

    local_gbs = 2 * gbs(lambda: other.copy_(own))
    if num_ranks == 1:
        return DevicePeaks(local_gbs=local_gbs)
    visible = symm_mem.empty(own.numel(), dtype=torch.int32, device=own.device)
    peer = symm_mem.rendezvous(visible, group).get_buffer((rank + 1) % num_ranks, visible.shape, torch.int32)
    return DevicePeaks(
        copy_engine_push_gbs=gbs(lambda: peer.copy_(own)),
        copy_engine_pull_gbs=gbs(lambda: own.copy_(peer)),
        sm_push_gbs=gbs(lambda: torch.neg(own, out=peer)),
        sm_pull_gbs=gbs(lambda: torch.neg(peer, out=own)),
        local_gbs=local_gbs,
    )

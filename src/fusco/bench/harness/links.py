"""Peak bandwidths of this run's links, with all ranks sending at once; measured times are compared with them.

Between GPUs within a node by copy engine and by SMs, between nodes by torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fusco.bench.harness.stopwatch import RankTimer
from fusco.core.topology import Topology

# Of a message, and of a copy: large enough that latency counts for little.
NUM_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
_NUM_REPEATS = 5
_NUM_BYTES_IN_NODE, _NUM_REPEATS_IN_NODE = 256 << 20, 10


@dataclass(frozen=True)
class InternodePeaks:
    """Bandwidths of torch.distributed point-to-point between nodes, in 10^9 bytes a second, rank and direction.

    All ranks send and receive as much at the same time, so each figure holds in both directions at once. Zeros
    with one node.
    """

    # a ring over nodes: each rank sends to the rank of the same local rank on the next node, and receives from the one
    # on the node before; on two nodes they are the same rank
    paired_gbs: float = 0.0
    spread_gbs: float = 0.0  # each rank exchanges equal parts with every rank of all other nodes

    @property
    def best_gbs(self) -> float:
        """The larger one, which times are compared with."""
        return max(self.paired_gbs, self.spread_gbs)


@dataclass(frozen=True)
class LinkPeaks:
    """Bandwidths in 10^9 bytes a second and rank: between nodes, and written by a plain copy within the device."""

    internode: InternodePeaks
    copy_gbs: float


def measure_links(group: dist.ProcessGroup, topology: Topology, device: str = "cpu") -> LinkPeaks:
    """Measure on ``"cpu"`` or ``"cuda"``; a collective of the group."""
    timer = RankTimer(group, device)
    source = torch.ones(NUM_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copying_ms = timer.median_ms(lambda: target.copy_(source), _NUM_REPEATS)
    return LinkPeaks(
        internode=measure_between_nodes(group, topology, timer, source, target), copy_gbs=len(source) / copying_ms / 1e6
    )


def exchange_messages(
    group: dist.ProcessGroup, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Send tensors to, and receive them from, the ranks named with them; all at once, and empty ones do not travel.

    Tensors are contiguous, one at most for each peer and direction. On CUDA the messages are ordered on the current
    stream; on the CPU they are complete when this returns. The group must have executed a collective before.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, messages in ((dist.irecv, receive), (dist.isend, send))
        for peer, tensor in messages
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def measure_between_nodes(
    group: dist.ProcessGroup, topology: Topology, timer: RankTimer, source: torch.Tensor, target: torch.Tensor
) -> InternodePeaks:
    """Measure between nodes; a collective of the group.

    Each rank sends ``source`` and receives into ``target``: contiguous uint8 of one size, on the device of the timer.
    """
    if topology.num_nodes == 1:
        return InternodePeaks()
    rank = dist.get_rank(group)
    node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
    following, preceding = (topology.node_to_ranks[(node + i) % topology.num_nodes][local] for i in (1, -1))
    others = [peer for other in topology.remote_nodes(rank) for peer in topology.node_to_ranks[other]]
    share = len(source) // len(others)

    def parts(whole: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        return [(peer, whole[i * share : (i + 1) * share]) for i, peer in enumerate(others)]

    def pair() -> None:
        exchange_messages(group, [(following, source)], [(preceding, target)])

    def spread() -> None:
        exchange_messages(group, parts(source), parts(target))

    return InternodePeaks(
        paired_gbs=len(source) / 1e6 / timer.median_ms(pair, _NUM_REPEATS),
        spread_gbs=share * len(others) / 1e6 / timer.median_ms(spread, _NUM_REPEATS),
    )


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
    import torch.distributed._symmetric_memory as symm_mem  # noqa: PLC0415  for GPUs only

    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    local = torch.ones(_NUM_BYTES_IN_NODE // 4, dtype=torch.int32, device="cuda")
    other = torch.empty_like(local)

    def gbs(work: Callable[[], object]) -> float:
        return round(_NUM_BYTES_IN_NODE / 1e6 / timer.median_ms(work, _NUM_REPEATS_IN_NODE), 1)

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

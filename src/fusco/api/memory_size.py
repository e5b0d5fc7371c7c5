"""Memory of a communicator, computed without making one."""

from __future__ import annotations

from dataclasses import replace

from fusco.core.config import Capacity, Settings
from fusco.core.memory_size import MemorySize
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.layout import CpuLayout
from fusco.cuda.kernels.copy_experts import bytes_of_experts
from fusco.cuda.memory.layout import DeviceLayout


def memory_size_hint(
    topology: Topology,
    capacity: Capacity,
    settings: Settings | None = None,
    device: str = "cpu",
    expert_placement: ExpertPlacement | None = None,
) -> MemorySize:
    """Return the memory of a communicator of this configuration on each rank, without making one.

    On the CPU this is shared and private memory of the host, with ``device="cuda"`` peer-visible GPU memory and what
    repeated calls keep at most; NCCL's memory and tables of a few bytes for each expert do not count. There an
    ``expert_placement`` takes room for counts of its experts and, if it has empty places, for copies. Raises
    ``ValueError`` for any other device.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> capacity = Capacity(max_tokens_per_rank=1024, max_bytes_per_token=8192, num_topk=8)
    >>> memory_size_hint(topology, capacity).pool_bytes == 2 * 1024 * 8192
    True
    """
    settings = settings or Settings()
    if device == "cuda":
        size = DeviceLayout(topology, capacity, settings).memory_size
        if expert_placement is None:
            return size
        nums = expert_placement.physical.num_experts, expert_placement.num_experts
        return replace(size, ring_bytes=size.ring_bytes + bytes_of_experts(topology.ranks_per_node, *nums))
    if device != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    return CpuLayout(topology, capacity, settings).memory_size

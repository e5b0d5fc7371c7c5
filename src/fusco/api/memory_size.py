"""Memory of a communicator, computed without making one."""

from __future__ import annotations

from fusco.core.config import Capacity, Settings
from fusco.core.memory_size import MemorySize
from fusco.core.topology import Topology
from fusco.cpu.layout import CpuLayout
from fusco.cuda.memory.layout import DeviceLayout


def memory_size_hint(
    topology: Topology, capacity: Capacity, settings: Settings | None = None, device: str = "cpu"
) -> MemorySize:
    """Return the memory of a communicator of this configuration on each rank, without making one.

    On the CPU this is shared and private memory of the host, with ``device="cuda"`` peer-visible GPU memory and what
    repeated calls keep at most; NCCL's memory and tables of a few bytes for each expert do not count. Raises
    ``ValueError`` for any other device.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> capacity = Capacity(max_tokens_per_rank=1024, max_bytes_per_token=8192, num_topk=8)
    >>> memory_size_hint(topology, capacity).pool_bytes == 2 * 1024 * 8192
    True
    """
    settings = settings or Settings()
    if device == "cuda":
        return DeviceLayout(topology, capacity, settings).memory_size
    if device != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    return CpuLayout(topology, capacity, settings).memory_size

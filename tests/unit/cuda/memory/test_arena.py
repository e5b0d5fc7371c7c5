"""Memory that peers see: all ranks of a communicator have mapped it, or none."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from fusco import Capacity, Settings, Topology
from fusco.core.errors import SharedMemoryError
from fusco.cuda.gpu import Gpu
from fusco.cuda.memory import rendezvous as module
from fusco.cuda.memory.arena import Arena
from fusco.cuda.memory.layout import DeviceLayout
from store_gathers import ThreadStoreGather, on_ranks

LAYOUT = DeviceLayout(
    Topology.of_equal_nodes(2, 2), Capacity(max_tokens_per_rank=4, max_bytes_per_token=8, num_topk=1), Settings()
)


@dataclass(frozen=True)
class Handle:
    memory: torch.Tensor

    @property
    def buffer_ptrs(self):
        return [self.memory.data_ptr()] * 2

    def get_buffer(self, rank, size, dtype):
        return self.memory[: size[0]]


class SymmetricMemory:
    """Replaces ``_SymmetricMemory``; memory that begins with 7 is out of reach."""

    def set_group_info(self, name, rank, world_size, store) -> None:
        pass

    def rendezvous(self, memory, name):
        if int(memory[0]) == 7:
            raise RuntimeError("peer access is not supported")
        return Handle(memory)


@pytest.mark.parametrize(("mark", "expected"), [(7, "rank 1:"), (0, "mapped")])
def test_memory_that_one_rank_cannot_map_fails_on_all(mark, expected):
    def share(store_gather: ThreadStoreGather):
        memory = torch.zeros(LAYOUT.offsets["end"], dtype=torch.uint8)
        memory[0] = mark * store_gather.rank
        try:
            arena = Arena(LAYOUT, memory, store_gather, Gpu(torch.device("cpu")))
        except SharedMemoryError as error:
            return str(error)[:7]
        return "mapped" if arena.address(0, 5) == memory.data_ptr() + 5 else "elsewhere"

    with mock.patch.object(module, "_SymmetricMemory", SymmetricMemory()):
        outcomes = on_ranks(2, share, timeout_s=2.0)
    assert outcomes == dict.fromkeys(range(2), expected)

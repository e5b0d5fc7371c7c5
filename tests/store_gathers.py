"""All-gathers through a store among threads of one process, one thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fusco.control.store_gather import StoreGather


class ThreadStoreGather(StoreGather):
    """The store gather of one thread; all threads of a world share a store."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, timeout_s: float) -> None:
        self.rank, self.world_size, self.store, self.timeout_s = rank, world_size, store, timeout_s
        self.name = f"rank {rank}"  # the name of the process group, which PyTorch keeps unique in a process
        self._watcher, self.number = None, 1


def on_ranks(
    world_size: int,
    function: Callable[[ThreadStoreGather], Any],
    *,
    absent: tuple[int, ...] = (),
    timeout_s: float = 20.0,
    store: Any = None,
) -> dict[int, Any]:
    """Run a function on every rank that is not absent; return its result or error by rank."""
    store, results = store or dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadStoreGather(rank, world_size, store, timeout_s))
        except Exception as error:  # noqa: BLE001  the caller checks it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results

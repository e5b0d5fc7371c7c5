"""All-gathers through a store among threads of one process, which play the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fusco.control.store_gather import StoreGather


class ThreadStoreGather(StoreGather):
    """The store gather of one thread; all threads of a world share a store."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, timeout_s: float) -> None:
        self.rank, self.world_size, self.store, self.timeout_s = rank, world_size, store, timeout_s
        self.name = f"rank {rank}"  # names a process group; PyTorch requires unique names within a process
        self._watcher, self.number = None, 1


def on_ranks(
    world_size: int,
    function: Callable[[ThreadStoreGather], Any],
    *,
    absent: tuple[int, ...] = (),
    timeout_s: float = 20.0,
    store: Any = None,
) -> dict[int, Any]:
    """Return a function's result, or the exception that it raised, for each rank that is not absent.

    What pytest raises if a rank's ``pytest.raises`` sees no error is raised here.
    """
    store, results = store or dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadStoreGather(rank, world_size, store, timeout_s))
        except BaseException as error:  # noqa: BLE001  the caller checks the results
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in results.values():
        if isinstance(failure, pytest.fail.Exception):
            raise failure
    return results

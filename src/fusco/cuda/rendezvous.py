"""Symmetric memory's rendezvous through an all-gather: with a limit, and with words for who did not come.

PyTorch's own goes through the process group's store without a limit, under keys that count all rendezvous of the
process. Ranks that have met in groups of different sizes count differently, and then wait for each other for ever.

Between two rounds through the store it hands file descriptors round by a socket, and holds the interpreter's lock:
nothing in this process can look after it then, so the socket itself is given a limit.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from fusco.control.connect import raise_if_any
from fusco.control.store_gather import StoreGather
from fusco.core.errors import FuscoError

# Of the limit, for one file descriptor: all ranks are there to hand it over. Others that wait for this rank meanwhile
# ask it at 0.7 of their limit what it is doing, and it should be able to answer by then.
_HANDING_OVER = 0.5
_SOCKET_NAME = "symm_mem-"  # of PyTorch's IpcChannel, before the number of the process


class _StoreGatherStore(Store):
    """What symmetric memory asks of a store: that every rank of the group sets a value, and gets those of the others.

    Setting a value waits for the others'. So the number in a key does not matter, only the rank at its end.
    """

    def __init__(self, store_gather: StoreGather, ranks: Sequence[int], name: str) -> None:
        super().__init__()
        self._store_gather, self._ranks, self._name = store_gather, ranks, name
        self._num_rounds = 0
        self._values: list[str] = []
        self.failure: FuscoError | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # noqa: ARG002
        """Tell all ranks a value."""
        _limit_handing_over(_HANDING_OVER * self._store_gather.timeout_s)
        try:
            self._values = [entry["value"] for entry in self._meet(value=value.hex())]
        except FuscoError as error:
            self.failure = error
            raise

    def finish(self, error: str) -> None:
        """Tell all ranks that this one has mapped everything, or why not; ``SharedMemoryError`` if one could not.

        Nodes may differ in how many values they exchange, so whoever has finished meets the others until all have.
        """
        while not all(entry["has_finished"] for entry in self._meet(has_finished=True, error=error)):
            pass

    def _meet(self, *, value: str = "", has_finished: bool = False, error: str = "") -> list[dict[str, Any]]:
        told = {"value": value, "has_finished": has_finished, "error": error}
        entries = self._store_gather.all_gather(f"{self._name} {self._num_rounds}", told)
        self._num_rounds += 1
        raise_if_any([entry["error"] for entry in entries])
        return entries

    def get(self, key: str) -> bytes:
        """What a rank told in the latest round."""
        local = int(key.rsplit("/", maxsplit=1)[-1])
        return bytes.fromhex(self._values[self._ranks[local]])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """All that can be asked for has come."""


def rendezvous(memory: torch.Tensor, store_gather: StoreGather, ranks: Sequence[int], name: str) -> Any:
    """Map the memory of all ``ranks``; an all-gather of all ranks of the communicator, whoever shares memory with whom.

    Args:
        memory: from ``torch.distributed._symmetric_memory.empty``, of the same size on all of ``ranks``.
        store_gather: finds the ranks.
        ranks: those that share memory, this one among them.
        name: of this rendezvous, like no other of the roll.

    Returns:
        PyTorch's handle, by index in ``ranks``.

    Raises:
        SharedMemoryError: on all ranks, where one cannot reach a peer. PeerFailureError: if a rank does not come.

    """
    local = ranks.index(store_gather.rank)
    store = _StoreGatherStore(store_gather, ranks, name)
    group = ProcessGroup(store, local, len(ranks))
    unique: Any = f"{name} of {store_gather.name}"
    group._set_group_name(unique)  # noqa: SLF001  PyTorch offers no other way to have a group that is nobody's
    _register_process_group(unique, group)
    error, handle = "", None
    try:
        _SymmetricMemory.set_group_info(unique, local, len(ranks), store)  # where it is asked for depends on PyTorch
        handle = _SymmetricMemory.rendezvous(memory, unique)
    except RuntimeError as failure:
        if store.failure:
            raise store.failure from failure
        error = (
            f"peers' memory could not be mapped on {memory.device}: {str(failure).splitlines()[0]}. Ranks of a node "
            f"must each have a GPU of their own and reach all others' directly (nvidia-smi topo -m)"
        )
    finally:
        _unregister_process_group(unique)
    store.finish(error)
    return handle


def _limit_handing_over(limit_s: float) -> None:
    """Have PyTorch's socket for file descriptors, if this process has one, wait no longer than this."""
    fraction, seconds = math.modf(limit_s)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))  # a struct timeval
    for entry in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=int(entry))
        except OSError:
            continue  # no socket, or closed meanwhile
        try:
            if found.family == socket.AF_UNIX and _SOCKET_NAME in str(found.getsockname()):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        finally:
            found.detach()  # it is not ours to close

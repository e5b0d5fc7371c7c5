"""Rendezvous of symmetric memory through an all-gather with a time limit, which names missing ranks.

PyTorch's rendezvous uses the process group's store without a time limit, under keys that count all rendezvous of the
process. Ranks that took part in groups of different sizes count differently, and then wait for each other for ever.

Between two rounds through the store, PyTorch passes file descriptors through a socket while it holds the interpreter's
lock. No thread of this process can interrupt that, so the socket itself gets a time limit, and a rank that is through
with an all-gather waits for none that may be in this already (``MemberGather``). PyTorch does not expose the
socket; it is found by its name, which torch 2.11 makes in ``IpcChannel::get_socket_name``. If another version names it
differently, the limit is lost: tests/cuda/test_cuda_socket_name.py and tests/unit/cuda/memory/test_rendezvous.py then
fail.
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
from fusco.control.member_gather import Gather
from fusco.core.errors import FuscoError

# Fraction of the time limit for one file descriptor; all ranks are present to send it. Others that wait for this rank
# ask for its status at 0.7 of their limit, and it should be able to answer by then.
_DESCRIPTOR_LIMIT = 0.5
SOCKET_NAME = "/symm_mem-"  # of PyTorch's IpcChannel, followed by the process id


class _StoreGatherStore(Store):
    """Store for symmetric memory, in which every rank of the group sets a value and gets those of the others.

    ``set`` is an all-gather, so the counter in a key does not matter, only the rank at its end.
    """

    def __init__(self, store_gather: Gather, ranks: Sequence[int], name: str) -> None:
        super().__init__()
        self._store_gather, self._ranks, self._name = store_gather, ranks, name
        self._num_rounds = 0
        self._values: list[str] = []
        self.failure: FuscoError | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # noqa: ARG002
        """All-gather a value."""
        _limit_descriptor_socket(_DESCRIPTOR_LIMIT * self._store_gather.timeout_s)
        try:
            self._values = [entry["value"] for entry in self._all_gather(value=value.hex())]
        except FuscoError as error:
            self.failure = error
            raise

    def finish(self, error: str) -> None:
        """Report that this rank has mapped everything, or why not; ``SharedMemoryError`` if one rank could not.

        Nodes may differ in how many values they exchange, so ranks keep gathering until all have finished.
        """
        while not all(entry["has_finished"] for entry in self._all_gather(has_finished=True, error=error)):
            pass

    def _all_gather(self, *, value: str = "", has_finished: bool = False, error: str = "") -> list[dict[str, Any]]:
        entry = {"value": value, "has_finished": has_finished, "error": error}
        entries = self._store_gather.all_gather(f"{self._name} {self._num_rounds}", entry)
        self._num_rounds += 1
        raise_if_any(self._store_gather, [entry["error"] for entry in entries])
        return entries

    def get(self, key: str) -> bytes:
        """Return a rank's value of the latest round."""
        local = int(key.rsplit("/", maxsplit=1)[-1])
        return bytes.fromhex(self._values[self._ranks[local]])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once: all values are here after ``set``."""


def rendezvous(memory: torch.Tensor, store_gather: Gather, ranks: Sequence[int], name: str) -> Any:
    """Map the memory of all ``ranks``, including this one, and return PyTorch's handle, by index in ``ranks``.

    A collective of all ranks of the communicator, on all nodes. The memory is of
    ``torch.distributed._symmetric_memory.empty``, of the same size on all of ``ranks``. ``name`` is unique within
    ``store_gather``.

    Raises:
        SharedMemoryError: on all ranks, if one cannot map a peer's memory. PeerFailureError: if a rank is missing.
    """
    local = ranks.index(store_gather.rank)
    store = _StoreGatherStore(store_gather, ranks, name)
    group = ProcessGroup(store, local, len(ranks))
    unique: Any = f"{name} of {store_gather.name}"
    group._set_group_name(unique)  # noqa: SLF001  PyTorch has no other way to name such a group
    _register_process_group(unique, group)
    error, handle = "", None
    try:
        _SymmetricMemory.set_group_info(unique, local, len(ranks), store)  # needed by some versions of PyTorch only
        handle = _SymmetricMemory.rendezvous(memory, unique)
    except RuntimeError as failure:
        if store.failure:
            raise store.failure from failure
        error = (
            f"peers' memory could not be mapped on {memory.device}: {str(failure).splitlines()[0]}. Ranks of a node "
            f"must each have their own GPU and reach all others' directly (nvidia-smi topo -m)"
        )
    finally:
        _unregister_process_group(unique)
    store.finish(error)
    return handle


def _limit_descriptor_socket(limit_s: float) -> None:
    """Set the send and receive timeouts of PyTorch's socket for file descriptors, if this process has one."""
    fraction, seconds = math.modf(limit_s)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))  # a struct timeval
    for entry in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=int(entry))
        except OSError:
            continue  # not a socket, or closed meanwhile
        try:
            if found.family == socket.AF_UNIX and SOCKET_NAME in str(found.getsockname()):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        finally:
            found.detach()  # PyTorch owns it

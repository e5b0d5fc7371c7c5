"""Symmetric memory's rendezvous through a roll call: with a limit, and with words for who did not come.

PyTorch's own goes through the process group's store without a limit, under keys that count all rendezvous of the
process. Ranks that have met in groups of different sizes count differently, and then wait for each other for ever.
"""

from __future__ import annotations

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

from fusco.errors import FuscoError, SharedMemoryError
from fusco.transport.roll_call import RollCall


class _RollCallStore(Store):
    """What symmetric memory asks of a store: that every rank of the group sets a value, and gets those of the others.

    Setting a value waits for the others'. So the number in a key does not matter, only the rank at its end.
    """

    def __init__(self, roll: RollCall, ranks: Sequence[int], name: str) -> None:
        super().__init__()
        self._roll, self._ranks, self._name = roll, ranks, name
        self._num_rounds = 0
        self._values: list[str] = []
        self.failure: FuscoError | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # noqa: ARG002
        """Tell all ranks a value."""
        try:
            self._values = self._roll.gather(f"{self._name} {self._num_rounds}", value.hex())
        except FuscoError as error:
            self.failure = error
            raise
        self._num_rounds += 1

    def get(self, key: str) -> bytes:
        """What a rank told in the latest round."""
        local = int(key.rsplit("/", maxsplit=1)[-1])
        return bytes.fromhex(self._values[self._ranks[local]])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """All that can be asked for has come."""


def rendezvous(memory: torch.Tensor, roll: RollCall, ranks: Sequence[int], name: str) -> Any:
    """Map the memory of all ``ranks``; a roll call of all ranks of the communicator, whoever shares memory with whom.

    Args:
        memory: from ``torch.distributed._symmetric_memory.empty``, of the same size on all of ``ranks``.
        roll: finds the ranks.
        ranks: those that share memory, this one among them.
        name: of this rendezvous, like no other of the roll.

    Returns:
        PyTorch's handle, by index in ``ranks``.

    Raises:
        SharedMemoryError: if a peer is out of reach. PeerFailureError: if a rank does not come.

    """
    local = ranks.index(roll.rank)
    store = _RollCallStore(roll, ranks, name)
    group = ProcessGroup(store, local, len(ranks))
    unique: Any = f"{name} of {roll.name}"
    group._set_group_name(unique)  # noqa: SLF001  PyTorch offers no other way to have a group that is nobody's
    _register_process_group(unique, group)
    try:
        _SymmetricMemory.set_group_info(unique, local, len(ranks), store)  # where it is asked for depends on PyTorch
        return _SymmetricMemory.rendezvous(memory, unique)
    except RuntimeError as error:
        if store.failure:
            raise store.failure from error
        raise SharedMemoryError(
            f"peers' memory could not be mapped on {memory.device}: {str(error).splitlines()[0]}. Ranks of a node "
            f"must each have a GPU of their own and reach all others' directly (nvidia-smi topo -m)"
        ) from error
    finally:
        _unregister_process_group(unique)

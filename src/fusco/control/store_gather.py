"""How ranks find each other while a communicator is made: through the process group's store, with a limit."""

from __future__ import annotations

import copy
import functools
import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fusco.core.errors import PeerFailureError, Stall, TransportError

_Result = TypeVar("_Result")
WaitUntil: TypeAlias = Callable[[Callable[[], bool], Callable[[], Stall]], None]
_SECONDS_BETWEEN_LOOKS = 0.005


class RollCall:
    """Gathers small JSON values from all ranks of a group; they make their roll calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        of_group = PrefixStore(f"fusco/{ranks}", _get_default_store())
        # The n-th communicator of this group on every rank: the store counts, so that no process need remember.
        number = _asking(lambda: of_group.add(f"count/{self.rank}", 1))
        self.name = f"fusco/{ranks}/{number}"  # like that of no other roll
        self.store = PrefixStore(str(number), of_group)
        self.wait_until: WaitUntil = self._wait_until

    def watched_by(self, wait_until: WaitUntil) -> RollCall:
        """The same roll, which waits by other means: once somebody watches the ranks, with an eye on who dies."""
        watched = copy.copy(self)
        watched.wait_until = wait_until
        return watched

    @property
    def store_host(self) -> str:
        """The host that serves the process group's store, which every rank can reach; this one if it has none."""
        store: Store = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return str(getattr(store, "host", None) or socket.gethostname())

    def gather(self, stage: str, value: Any) -> list[Any]:
        """Publish a value and return those of all ranks.

        Raises ``PeerFailureError`` naming the ranks that did not come within the limit.
        """
        keys = [f"{stage}/{rank}" for rank in range(self.world_size)]
        _asking(lambda: self.store.set(keys[self.rank], json.dumps(value)))

        def have_all_come() -> bool:
            if self._has(keys):
                return True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            return False

        def stall() -> Stall:
            missing = tuple(rank for rank, key in enumerate(keys) if not self._has([key]))
            return Stall(stage, missing, f"all {self.world_size} ranks", f"{self.world_size - len(missing)}")

        self.wait_until(have_all_come, stall)
        return [json.loads(_asking(functools.partial(self.store.get, key))) for key in keys]

    def _wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], Stall]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not is_ready():
            if time.monotonic() > deadline and (late := stall()).on_ranks:
                raise PeerFailureError(
                    rank=self.rank,
                    peers=late.on_ranks,
                    operation="Communicator",
                    stall=late,
                    reason=f"rank(s) {', '.join(map(str, late.on_ranks))} did not come within {self.timeout_s} s",
                    has_left=False,
                )

    def _has(self, keys: list[str]) -> bool:
        return _asking(lambda: self.store.check(keys))


def _asking(request: Callable[[], _Result]) -> _Result:
    try:
        return request()
    except RuntimeError as error:
        raise TransportError(f"the process group's store cannot be reached: {error}") from error

"""All-gather of small values through the process group's store, with a time limit, while a communicator is made."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fusco.control.watchdog import Watchdog
from fusco.core.errors import PeerFailureError, Stall, TransportError, first_line
from fusco.core.threads import in_thread

_Result = TypeVar("_Result")

_SECONDS_BETWEEN_POLLS = 0.005
# Interval at which a rank checks for each missing rank, and what each rank adds to it, as each check is a request.
_SECONDS_BETWEEN_ROUNDS, _SECONDS_PER_RANK = 0.1, 0.002
_FAILURE = "failure"  # key of a rank that fails, and of the reason
_SILENT_S = 1.0  # a store that has not answered for so long is what a rank waits for
# The wait in ``part``, as a share of the limit and at most. Ranks that fail for one reason do so within milliseconds.
_PARTING, _MAX_PARTING_S = 0.05, 1.0


class StoreGather:
    """All-gathers of small JSON values among the ranks of a group; all ranks make them in the same order.

    A thread sends the requests to the store: a stopped store answers none, and a request has no time limit.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._watcher: Watchdog | None = None
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        self.store: Store = _get_default_store()
        of_group = PrefixStore(f"fusco/{ranks}", self.store)
        # The n-th communicator of this group on every rank. The store counts them, so processes need no state.
        request = in_thread(lambda: of_group.add(f"count/{self.rank}", 1), "the first request to the store")
        self.wait_until(request.done, lambda: self._stall_of_store("the first all-gather", 0.0))
        try:
            self.number: int = request.result()
        except RuntimeError as error:
            raise TransportError(self._failure(error)) from error
        self.name = f"fusco/{ranks}/{self.number}"  # unique
        self.store = PrefixStore(str(self.number), of_group)

    @property
    def members(self) -> tuple[int, ...]:
        """The number of each rank in the group."""
        return tuple(range(self.world_size))

    @property
    def num_ranks(self) -> int:
        """Ranks of the group, absent ones included: none is."""
        return self.world_size

    @property
    def groups_store(self) -> Store:
        """The process group's store, without prefixes."""
        return _bare(self.store)

    @property
    def store_host(self) -> str:
        """The host that serves the process group's store, which every rank can reach; this host if there is none."""
        return str(getattr(_bare(self.store), "host", None) or socket.gethostname())

    def watched_by(self, watcher: Watchdog) -> None:
        """From now on wait through a watchdog, and ask it which rank is at fault if the store fails."""
        self._watcher = watcher

    def wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], Stall]) -> None:
        """Wait for a condition; after the limit raise ``PeerFailureError``, or ``TransportError`` for the store."""
        if self._watcher:
            self._watcher.wait_until(is_ready, stall)
            return
        deadline = time.monotonic() + self.timeout_s
        while not is_ready():
            time.sleep(_SECONDS_BETWEEN_POLLS / 5)
            if time.monotonic() > deadline:
                self._give_up(stall())

    def all_gather(self, stage: str, value: Any) -> list[Any]:
        """Publish a value and return those of all ranks.

        ``stage`` names the all-gather, in keys and in errors.

        Raises:
            PeerFailureError: with the ranks that did not join within the limit, or that do not answer while the store
                does not; at once with a rank that fails alone (``part``).
            TransportError: if the store cannot be reached; ranks are not examined, as they leave for the same reason.
        """
        gathering = _Gathering(self.store, stage, range(self.world_size), self.rank, json.dumps(value), _FAILURE)
        values = in_thread(gathering.run, f"the all-gather of {stage!r} through the store")

        def stall() -> Stall:
            if (silent_s := gathering.silent_s) > _SILENT_S:
                return self._stall_of_store(stage, silent_s)
            missing = gathering.missing
            return Stall(stage, missing, f"all {self.world_size} ranks", f"{self.world_size - len(missing)}")

        try:
            return self._results(values, stall)
        except PeerFailureError as error:
            if error.peers:
                raise
            raise TransportError(error.reason) from error  # all ranks live, and wait for the store
        finally:
            gathering.is_over = True

    def _results(self, values: Future[list[bytes]], stall: Callable[[], Stall]) -> list[Any]:
        self.wait_until(values.done, stall)
        try:
            return [json.loads(text) for text in values.result()]
        except _RankFailedError as error:
            self._raise_failure(stall(), (error.rank,), error.reason, has_left=True)
        except RuntimeError as error:
            if self._watcher:
                self._watcher.give_up(self._failure(error), at_fault=())
            raise TransportError(self._failure(error)) from error

    def fail(self, stall: Stall, reason: str) -> NoReturn:
        """Raise ``PeerFailureError`` for the ranks of a wait that cannot end; a watchdog tells all other ranks."""
        if self._watcher:
            self._watcher.find_fault(stall, reason)
        self._raise_failure(stall, stall.on_ranks, reason, has_left=False)

    def part(self, without: Sequence[int] = (), reason: str = "") -> None:
        """Wait, before this rank raises, until all ranks but ``without`` are about to raise, or for a short time.

        This rank may serve the store, and values that other ranks wait for would be lost with its process. With a
        ``reason`` it fails, perhaps alone: ranks that miss its values raise ``PeerFailureError`` at once.
        """
        deadline = time.monotonic() + min(_PARTING * self.timeout_s, _MAX_PARTING_S)
        others = [rank for rank in range(self.world_size) if rank not in without]
        gathering = _Gathering(self.store, "parting", others, self.rank, "")

        def leave() -> None:
            if reason:
                self.store.set(_FAILURE, json.dumps([self.rank, reason]))
            gathering.run()

        arrivals = in_thread(leave, "the parting of ranks through the store")
        while not arrivals.done() and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_POLLS / 5)
        gathering.is_over = True

    def _give_up(self, stall: Stall) -> NoReturn:
        if not stall.on_ranks:
            raise TransportError(
                f"{self._store_description} did not answer within {self.timeout_s} s: the process that serves it is "
                f"stopped, hung or unreachable"
            )
        reason = f"rank(s) {', '.join(map(str, stall.on_ranks))} did not join within {self.timeout_s} s"
        self._raise_failure(stall, stall.on_ranks, reason, has_left=False)

    def _raise_failure(self, stall: Stall, peers: tuple[int, ...], reason: str, *, has_left: bool) -> NoReturn:
        raise PeerFailureError(
            rank=self.rank, peers=peers, operation="Communicator", stall=stall, reason=reason, has_left=has_left
        )

    def _stall_of_store(self, stage: str, silent_s: float) -> Stall:
        return Stall(stage, (), f"an answer of {self._store_description}", f"none for {silent_s:.1f} s")

    def _failure(self, error: Exception) -> str:
        return (
            f"{self._store_description} cannot be reached: the process that serves it, or its host, has gone away "
            f"({first_line(error)})"
        )

    @property
    def _store_description(self) -> str:
        if not (port := getattr(_bare(self.store), "port", None)):
            return "the process group's store"
        return f"the process group's store at {self.store_host}:{port} (rank 0 serves it, unless a launcher does)"


class _RankFailedError(Exception):
    """A rank has failed while this one waits for its value."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.reason = rank, reason


class _Gathering:
    """Requests of one rank to the store in one all-gather, made in a thread; other threads read its progress."""

    def __init__(
        self, store: Store, stage: str, ranks: Sequence[int], rank: int, text: str, failure_key: str = ""
    ) -> None:
        """``failure_key`` is that of the rank that fails, if this raises for it."""
        self._store, self._key, self._text, self._failure_key = store, f"{stage}/{rank}", text, failure_key
        self._rank_to_key = {rank: f"{stage}/{rank}" for rank in ranks}
        self.missing = tuple(other for other in ranks if other != rank)  # as of the last check
        self.is_over = False  # set when no thread waits for it any more
        self._asked_at: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the request that is under way was sent; 0 if there is none."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def run(self) -> list[bytes]:
        """Set this rank's value, wait for those of all ranks, and return them by rank; empty if ``is_over`` is set."""
        self._ask(lambda: self._store.set(self._key, self._text))
        interval_s = _SECONDS_BETWEEN_ROUNDS + _SECONDS_PER_RANK * len(self._rank_to_key)
        next_round = time.monotonic() + interval_s
        while not self._has(*self._rank_to_key.values()):
            if self.is_over:
                return []
            if time.monotonic() > next_round:
                self.missing = tuple(rank for rank in self.missing if not self._has(self._rank_to_key[rank]))
                if self._failure_key and self._has(self._failure_key) and not self._has(*self._rank_to_key.values()):
                    raise _RankFailedError(*json.loads(self._ask(lambda: self._store.get(self._failure_key))))
                next_round = time.monotonic() + interval_s
            time.sleep(_SECONDS_BETWEEN_POLLS)
        self.missing = ()
        return [self._ask(functools.partial(self._store.get, key)) for key in self._rank_to_key.values()]

    def _has(self, *keys: str) -> bool:
        return self._ask(lambda: self._store.check(list(keys)))

    def _ask(self, request: Callable[[], _Result]) -> _Result:
        self._asked_at = time.monotonic()
        result = request()
        self._asked_at = None
        return result


def _bare(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

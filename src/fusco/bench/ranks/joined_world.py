"""A function run on all ranks of a launched job; rank 0 gets the results and reports failures."""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fusco.bench.ranks.failures import RankFailedError, RankFailure, ReportedElsewhereError
from fusco.bench.ranks.torchrun import join_torchrun

_Result = TypeVar("_Result")

# Limits of the other ranks' end once one has failed, and of a function in all; as in ``LocalWorld``.
_GRACE_S, _LIMIT_S = 30.0, 600.0
# Time for rank 0 to print its report before another rank ends: launchers then end all ranks.
_REPORT_S = 2.0
_POLL_S = 0.05
_FINE, _FAILED = "fine", "failed"


def run_joined(device: str, function: Callable[..., _Result], *args: Any) -> list[_Result] | None:
    """Join the launched job and call ``function(group, *args)`` on all its ranks, each with one compute thread.

    Returns the results by rank on rank 0, ``None`` on the others. If the function raises on any rank, rank 0 raises
    ``RankFailedError`` with the failures of all, so that one rank reports them, and the others raise
    ``ReportedElsewhereError`` within a limit. If rank 0 does not answer, they raise their own errors.
    """
    faulthandler.enable()  # a signal such as SIGSEGV that ends this process says where, on stderr
    torch.set_num_threads(1)
    job = join_torchrun(device)
    assert dist.group.WORLD is not None
    outcomes = Outcomes(PrefixStore("fusco/outcomes", _get_default_store()), job.rank, job.world_size)
    try:
        result = function(dist.group.WORLD, *args)
    except Exception as error:
        outcomes.settle(RankFailure.of(error))
        raise  # rank 0 has not answered
    outcomes.settle(None)
    results: list[Any] | None = None if job.rank else [None] * job.world_size
    dist.gather_object(result, results)
    dist.destroy_process_group()  # after an error others may still be in a collective; the launcher ends them
    return results


class Outcomes:
    """The outcome of a function on each rank, exchanged through the job's store: that needs no collective."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def settle(self, failure: RankFailure | None) -> None:
        """Publish this rank's outcome, and return if no rank failed.

        Otherwise rank 0 raises ``RankFailedError`` with all failures, and the others raise ``ReportedElsewhereError``.
        If rank 0 gives no result in time, a rank that has failed returns, and others raise ``RankFailedError``.
        """
        self._store.set(f"rank/{self._rank}", json.dumps(asdict(failure) if failure else None))
        if self._rank == 0:
            self._collect()
            return
        limit_s = _LIMIT_S if failure is None else _GRACE_S + 2 * _REPORT_S
        deadline = time.monotonic() + limit_s
        while not self._store.check(["result"]):
            if time.monotonic() > deadline:
                if failure is None:
                    raise RankFailedError({}, f"rank 0 gave no result within {limit_s:g} s")
                return
            time.sleep(_POLL_S)
        if self._store.get("result") == _FAILED.encode():
            time.sleep(_REPORT_S)
            raise ReportedElsewhereError("rank 0 reports the failure")

    def _collect(self) -> None:
        """Rank 0's part: wait for all outcomes, but only briefly once one rank has failed."""
        outcomes: dict[int, RankFailure | None] = {}
        deadline, limit = time.monotonic() + _LIMIT_S, f"{_LIMIT_S:g} s"
        while len(outcomes) < self._world_size and time.monotonic() < deadline:
            for rank in set(range(self._world_size)) - set(outcomes):
                if self._store.check([f"rank/{rank}"]):
                    fields = json.loads(self._store.get(f"rank/{rank}"))
                    outcomes[rank] = RankFailure(**fields) if fields else None
            if any(outcomes.values()) and time.monotonic() + _GRACE_S < deadline:
                deadline, limit = time.monotonic() + _GRACE_S, f"{_GRACE_S:g} s after another failed"
            time.sleep(_POLL_S)
        waiting = sorted(set(range(self._world_size)) - set(outcomes))
        failures = {rank: failure for rank, failure in outcomes.items() if failure is not None}
        self._store.set("result", _FAILED if failures or waiting else _FINE)
        if failures or waiting:
            raise RankFailedError(failures, f"rank(s) {waiting} gave no result within {limit}" if waiting else "")

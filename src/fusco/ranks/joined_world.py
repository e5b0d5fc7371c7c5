"""This process as one rank of a job that torchrun, or whoever sets the same variables, has started."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fusco.ranks.failures import RankFailedError, RankFailure, ToldElsewhereError

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


# How long ranks may take to end once one has failed, and how long a function may take in all; as of a ``LocalWorld``.
_GRACE_S, _LIMIT_S = 30.0, 600.0
# What rank 0 has to say it in before another rank ends, as launchers then end all.
_TELLING_S = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
_FINE, _FAILED = "fine", "failed"


@dataclass(frozen=True)
class Launched:
    """What a launcher says about this process: ``rank`` of ``world_size``, of which ``local_world_size`` are here."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launched | None:
        """Read torchrun's variables; ``None`` if this process was started by no launcher.

        Raises ``ValueError`` for some of the variables without the others, or such that are no numbers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [environment.get(name) for name in names]
        if values[0] is None and values[1] is None:
            return None
        listing = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        numbers = [int(value) for value in values if value is not None and value.isdecimal()]
        if len(numbers) < len(names):
            raise ValueError(f"a launched rank needs {', '.join(names)} (torchrun sets them), got {listing}")
        return cls(*numbers)


class JoinedWorld:
    """Functions run on all ranks of a launched job, as on those of a ``LocalWorld``; rank 0 gets the results.

    It also gets the failures, so that one rank tells what has failed on all.
    """

    def __init__(self, launched: Launched, device: str = "cpu") -> None:
        self._launched, self._num_runs = launched, 0
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(launched.local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

    def run(
        self, function: Callable[Concatenate[dist.ProcessGroup, _P], _Result], *args: _P.args, **kwargs: _P.kwargs
    ) -> list[_Result] | None:
        """Call ``function(group, *args)``, on all ranks; its results by rank on rank 0, ``None`` on the others.

        If it raises anywhere, raises ``RankFailedError`` on rank 0, and on the others ``ToldElsewhereError`` in time,
        unless rank 0 is silent: then they raise their own error.
        """
        assert dist.group.WORLD is not None
        self._num_runs += 1
        outcomes = Outcomes(
            PrefixStore(f"fusco/outcomes/{self._num_runs}", _get_default_store()),
            self._launched.rank,
            self._launched.world_size,
        )
        try:
            result = function(dist.group.WORLD, *args, **kwargs)
        except Exception as error:
            outcomes.settle(RankFailure.of(error))
            raise  # rank 0 is silent
        outcomes.settle(None)
        results: list[Any] | None = [None] * self._launched.world_size if self._launched.rank == 0 else None
        dist.gather_object(result, results)
        return results

    def __enter__(self) -> JoinedWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else others may still be in a collective, and the launcher ends them
            dist.destroy_process_group()


class Outcomes:
    """How a function ended on each rank, told through the job's store, which needs no rank to be in a collective."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def settle(self, failure: RankFailure | None) -> None:
        """Tell how it ended here, and return if it ended well everywhere.

        Otherwise raises ``RankFailedError`` with all failures on rank 0 and ``ToldElsewhereError`` on the others. Where
        rank 0 does not come to a verdict in time, returns on a rank that has failed, and raises on others.
        """
        self._store.set(f"rank/{self._rank}", json.dumps(asdict(failure) if failure else None))
        if self._rank == 0:
            self._judge()
            return
        limit_s = _LIMIT_S if failure is None else _GRACE_S + 2 * _TELLING_S
        deadline = time.monotonic() + limit_s
        while not self._store.check(["verdict"]):
            if time.monotonic() > deadline:
                if failure is None:
                    raise RankFailedError({}, f"rank 0 gave no result within {limit_s:g} s")
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if self._store.get("verdict") == _FAILED.encode():
            time.sleep(_TELLING_S)
            raise ToldElsewhereError("rank 0 tells what has failed")

    def _judge(self) -> None:
        """Rank 0's part: hear all, but not for long once one has failed."""
        heard: dict[int, RankFailure | None] = {}
        deadline, limit = time.monotonic() + _LIMIT_S, f"{_LIMIT_S:g} s"
        while len(heard) < self._world_size and time.monotonic() < deadline:
            for rank in set(range(self._world_size)) - set(heard):
                if self._store.check([f"rank/{rank}"]):
                    fields = json.loads(self._store.get(f"rank/{rank}"))
                    heard[rank] = RankFailure(**fields) if fields else None
            if any(heard.values()) and time.monotonic() + _GRACE_S < deadline:
                deadline, limit = time.monotonic() + _GRACE_S, f"{_GRACE_S:g} s after another failed"
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        waiting = sorted(set(range(self._world_size)) - set(heard))
        failures = {rank: failure for rank, failure in heard.items() if failure is not None}
        self._store.set("verdict", _FAILED if failures or waiting else _FINE)
        if failures or waiting:
            raise RankFailedError(failures, f"rank(s) {waiting} gave no result within {limit}" if waiting else "")


def launched() -> Launched | None:
    """What the environment of this process says."""
    return Launched.from_environment(os.environ)

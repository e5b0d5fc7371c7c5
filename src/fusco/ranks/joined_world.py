"""This process as one rank of a job that torchrun, or whoever sets the same variables, has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


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
    """Functions run on all ranks of a launched job, as on those of a ``LocalWorld``; rank 0 gets the results."""

    def __init__(self, launched: Launched, device: str = "cpu") -> None:
        self._launched = launched
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(launched.local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

    def run(
        self, function: Callable[Concatenate[dist.ProcessGroup, _P], _Result], *args: _P.args, **kwargs: _P.kwargs
    ) -> list[_Result] | None:
        """Call ``function(group, *args)``, on all ranks; its results by rank on rank 0, ``None`` on the others."""
        assert dist.group.WORLD is not None
        result = function(dist.group.WORLD, *args, **kwargs)
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


def launched() -> Launched | None:
    """What the environment of this process says."""
    return Launched.from_environment(os.environ)

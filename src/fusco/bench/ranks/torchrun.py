"""This process as a rank of a job of torchrun, or of a launcher that sets the same variables; a function run there."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.failures import RankFailedError, RankFailure, ReportedElsewhereError
from fusco.control.bootstrap import DeviceIdentity, PeerInfo, check_devices, host_identity
from fusco.core.environment import SHARE_GPUS, may_share_gpus
from fusco.core.topology import Topology

_Result = TypeVar("_Result")
# Limits of the other ranks' end once one has failed, and of a function in all; as in ``LocalWorld``.
_GRACE_S, _LIMIT_S = 30.0, 600.0
# Time for rank 0 to print its report before another rank ends: launchers then end all ranks.
_REPORT_S = 2.0
_POLL_S = 0.05
_FINE, _FAILED = "fine", "failed"


@dataclass(frozen=True)
class Launched:
    """The launcher's variables: ``rank`` of ``world_size``; ``local_rank`` of ``local_world_size`` on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launched | None:
        """Read torchrun's variables; ``None`` if no launcher started this process.

        Raises ``ValueError`` if some of the variables are missing, or are not numbers of ranks.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [environment.get(name) for name in names]
        if values[0] is None and values[1] is None:
            return None
        listing = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        numbers = [int(value) for value in values if value is not None and value.isdecimal()]
        if len(numbers) < len(names):
            raise ValueError(f"a launched rank needs {', '.join(names)} (torchrun sets them), got {listing}")
        found = cls(*numbers)
        if not (found.local_rank < found.local_world_size <= found.world_size and found.rank < found.world_size):
            raise ValueError(f"a launched rank must be one of its job's, and of its machine's, got {listing}")
        return found


def launched() -> Launched | None:
    """Return this process's rank in a launched job; ``None`` if no launcher started this process."""
    return Launched.from_environment(os.environ)


def join_torchrun(device: str) -> Launched:
    """Choose this rank's GPU and initialise the default process group with all ranks of the launched job.

    With ``"cpu"`` it has gloo, with ``"cuda"`` gloo for CPU tensors and NCCL for CUDA tensors, over sockets if ranks
    share a GPU. The caller destroys it.
    Raises ``ValueError`` if no launcher started this process, or if it has no GPU for this rank.
    """
    rank = launched()
    if rank is None:
        raise ValueError("RANK and WORLD_SIZE are not set: start this program with torchrun --nproc-per-node N")
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        torch.cuda.set_device(choose_gpu(rank.local_rank, num_gpus))
        if rank.local_world_size > num_gpus and may_share_gpus():
            nodes = Topology.of_equal_nodes(rank.world_size, rank.local_world_size)
            os.environ.update(emulated_network(nodes, os.environ, num_gpus)[rank.rank])  # before NCCL reads it
    dist.init_process_group(backends_for(device))
    if device == "cuda" and rank.local_world_size > 1 and num_gpus == 1:
        _check_gpus(rank.world_size)
    return rank


def _check_gpus(world_size: int) -> None:
    """Raise ``ValueError`` on all ranks if two have one GPU; NCCL, which refuses it, names neither rank nor way out."""
    found: list[Any] = [None] * world_size
    local = DeviceIdentity.of(torch.device("cuda", torch.cuda.current_device()))
    dist.all_gather_object(found, (host_identity(), local))
    check_devices(PeerInfo([host for host, _ in found], [device for _, device in found], ""), range(len(found)))


def choose_gpu(local_rank: int, num_gpus: int) -> int:
    """Return the index of a rank's GPU, among those that its process sees.

    It is the local rank. A process that sees one GPU uses it, since some launchers show each rank its GPU only. With
    ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` ranks share GPUs in turn.

    Raises ``ValueError`` if there are too few GPUs.

    >>> choose_gpu(2, 4), choose_gpu(2, 1)
    (2, 0)
    """
    if local_rank < num_gpus:
        return local_rank
    if num_gpus == 1 or (num_gpus and may_share_gpus()):
        return local_rank % num_gpus
    raise ValueError(
        f"the rank with LOCAL_RANK={local_rank} needs GPU {local_rank}, but torch finds {num_gpus} on this machine "
        f"({SHARE_GPUS}=1 lets ranks share GPUs: right, but slow)"
    )


def backends_for(device: str) -> str:
    """Return the backends of a process group whose ranks have rows on ``device``."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


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

"""This process as one rank of a job that torchrun, or a launcher that sets the same variables, has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.bench.ranks.emulation import emulated_network
from fusco.control.bootstrap import DeviceIdentity, PeerInfo, check_devices, host_identity
from fusco.core.environment import SHARE_GPUS, may_share_gpus
from fusco.core.topology import Topology


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

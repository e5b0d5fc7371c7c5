"""Run the tests' functions on ranks, which are written for the CPU, on CUDA: inputs and outputs are copied.

Every output is poisoned on the device after it is copied, so that no stale rows of an earlier call can pass a test.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusco
from fusco.bench.ranks.local_world import LocalWorld
from fusco.core.environment import SHARE_GPUS, may_share_gpus


def skip_without_gpus(num_ranks: int) -> None:
    """Skip a test that needs more GPUs than the machine has, unless ranks may share them."""
    num_gpus = torch.cuda.device_count()
    if num_ranks > num_gpus and not (num_gpus and may_share_gpus()):
        pytest.skip(f"{num_ranks} ranks need as many GPUs, here are {num_gpus}; with {SHARE_GPUS}=1 they share them")


def load() -> float:
    """Return how many times longer a test may take than with the GPUs to itself: pytest-xdist's processes per GPU."""
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1.0, num_processes / max(1, torch.cuda.device_count()))


class DeviceWorld:
    """A ``LocalWorld`` that changes every ``Setup`` argument to CUDA, on one node or on the nodes of the test."""

    def __init__(self, world: LocalWorld, *, in_nodes: bool) -> None:
        self._world, self._in_nodes = world, in_nodes

    def run(self, function: Any, num_ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
        skip_without_gpus(num_ranks)
        return self._world.run(function, num_ranks, *self._for_cuda(args), **self._for_cuda(kwargs))

    def _for_cuda(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and hasattr(value, "ranks_per_node"):
            ranks_per_node = value.ranks_per_node if self._in_nodes else None
            return dataclasses.replace(value, device="cuda", ranks_per_node=ranks_per_node)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._for_cuda, value))
        if isinstance(value, dict):
            return {key: self._for_cuda(entry) for key, entry in value.items()}
        return value


def use_network_only(group: dist.ProcessGroup) -> None:
    """Make NCCL, before its first use, treat every rank as a separate host: then ranks may also share a GPU."""
    os.environ.update(NCCL_HOSTID=f"rank {dist.get_rank(group)}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


class OnDevice:
    """A CUDA communicator that takes and returns CPU tensors; other attributes are those of the communicator."""

    is_on_device = True

    def __init__(self, comm: fusco.Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def __enter__(self) -> OnDevice:
        self._comm.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._comm.__exit__(*exception)

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any = None, **options: Any) -> fusco.Dispatched:
        sent = self._comm.dispatch(_there(x), _there(topk_idx), _there(topk_weights), **options)
        return dataclasses.replace(
            sent,
            payloads=tuple(map(_back, sent.payloads)),
            num_rows_per_expert=sent.num_rows_per_expert.cpu(),
            weights=None if sent.weights is None else _back(sent.weights),
        )

    def dispatch_again(self, x: Any, handle: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(_back, self._comm.dispatch_again(_there(x), handle, **options)))

    def combine(self, y: Any, handle: Any, **options: Any) -> torch.Tensor:
        return _back(self._comm.combine(_there(y), handle, **options))

    def combine_all(self, ys: Any, handle: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(_back, self._comm.combine_all(_there(ys), handle, **options)))

    def dispatch_weights(self, topk_weights: Any, handle: Any, **options: Any) -> torch.Tensor:
        return _back(self._comm.dispatch_weights(_there(topk_weights), handle, **options))

    def combine_weights(self, values: Any, handle: Any, **options: Any) -> torch.Tensor:
        return _back(self._comm.combine_weights(_there(values), handle, **options))

    def shuffle(self, send: Any, receive: Any) -> None:
        there = _partners_there(receive)
        self._comm.shuffle(_partners_there(send), there)
        for rank, segments in there.items():
            receive[rank].base.copy_(segments.base)

    def all_to_all(self, output: Any, input: Any, *splits: Any, **options: Any) -> Any:  # noqa: A002  torch's names
        there = self._comm.all_to_all(_there(output), _there(input), *splits, **options)
        return _back(there) if output is None else output.copy_(there)

    def gather_send(self, segments: Any, dst: int) -> None:
        self._comm.gather_send(_segments_there(segments), dst)

    def scatter_recv(self, segments: Any, src: int) -> None:
        there = _segments_there(segments)
        self._comm.scatter_recv(there, src)
        segments.base.copy_(there.base)


def as_on_device(group: dist.ProcessGroup, job: Any, *args: Any) -> Any:
    """Run a test's function on the CPU through ``OnDevice``: what tests on GPUs ask of it, it can do."""
    from rank_setup import Setup  # noqa: PLC0415  it imports this module

    through = mock.patch.object(Setup, "on_device", lambda _, comm: OnDevice(comm))
    with through, mock.patch.object(torch.Tensor, "cuda", torch.Tensor.clone):
        return job(group, *args)


def _there(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.cuda()
    if isinstance(value, (list, tuple)):
        # Lists that are no payloads are invalid input of a test; they are passed on unchanged.
        return type(value)(map(_there, value)) if all(isinstance(v, torch.Tensor) for v in value) else value
    return value


def _back(value: torch.Tensor) -> torch.Tensor:
    if not (value.is_contiguous() or value.requires_grad):  # a plain copy has no gaps, as scales for TMA have
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").copy_(value)
    copy = value.to("cpu", copy=True)
    if not value.requires_grad and value.numel() and value.is_contiguous():
        value.view(-1).view(torch.uint8).fill_(0xFF)
    return copy


def _partners_there(partners: Any) -> Any:
    if not isinstance(partners, dict):
        return partners  # invalid input of a test
    return {rank: _segments_there(segments) for rank, segments in partners.items()}


def _segments_there(segments: Any) -> Any:
    if not isinstance(segments, fusco.Segments):
        return segments
    return fusco.Segments(segments.base.cuda(), segments.offset_bytes, segments.num_bytes)

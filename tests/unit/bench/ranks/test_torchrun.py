"""Joining torchrun: the environment, the GPU of a rank, the process group."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fusco.bench.ranks.torchrun import Launched, choose_gpu, join_torchrun, launched
from fusco.control import bootstrap
from fusco.core.environment import SHARE_GPUS

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_variables_of_a_launcher():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "HOME": "/"}
    assert Launched.from_environment(torchrun) == Launched(5, 8, 1, 4)
    assert Launched.from_environment({"HOME": "/", "LOCAL_RANK": "0"}) is None
    del torchrun["LOCAL_WORLD_SIZE"]
    with pytest.raises(ValueError, match=r"needs RANK, WORLD_SIZE.*LOCAL_RANK=1, LOCAL_WORLD_SIZE=None"):
        Launched.from_environment(torchrun)
    with pytest.raises(ValueError, match="RANK=five"):
        Launched.from_environment({**torchrun, "LOCAL_WORLD_SIZE": "4", "RANK": "five"})


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (8, 8, 0, 1), (1, 2, 1, 1), (1, 2, 1, 4)])
def test_a_rank_is_one_of_its_job_and_of_its_machine(numbers):
    with pytest.raises(ValueError, match=f"must be one of its job's.*got RANK={numbers[0]}, WORLD_SIZE={numbers[1]}"):
        Launched.from_environment(dict(zip(VARIABLES, map(str, numbers), strict=True)))


def test_without_a_launcher_joining_is_an_error(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    with pytest.raises(ValueError, match="RANK and WORLD_SIZE are not set: start this program with torchrun"):
        join_torchrun("cpu")


def test_the_gpu_is_that_of_the_local_rank(monkeypatch):
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    assert [choose_gpu(local_rank, 4) for local_rank in range(4)] == [0, 1, 2, 3]
    assert choose_gpu(3, 1) == 0, "the launcher shows each rank its GPU only"
    for num_gpus in (0, 2):
        with pytest.raises(ValueError, match=f"LOCAL_RANK=2 needs GPU 2, but torch finds {num_gpus}"):
            choose_gpu(2, num_gpus)


def test_ranks_share_gpus_in_turn_if_the_environment_allows_it(monkeypatch):
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert [choose_gpu(local_rank, 2) for local_rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="finds 0"):
        choose_gpu(0, 0)


def test_the_gpu_is_chosen_by_local_rank_before_the_group_is_initialised(monkeypatch):
    for name, value in zip(VARIABLES, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("gpu", index)))
    monkeypatch.setattr(dist, "init_process_group", lambda backends: calls.append(("group", backends)))
    assert join_torchrun("cuda") == Launched(5, 8, 1, 4)
    assert calls == [("gpu", 1), ("group", "cpu:gloo,cuda:nccl")]


def test_launched_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl(monkeypatch):
    for name, value in zip(VARIABLES, ("1", "2", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SHARE_GPUS, "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backends: None)
    join_torchrun("cuda")
    assert "NCCL_HOSTID" not in os.environ
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    join_gpu_of(monkeypatch, "gpu 0", "gpu 0")
    assert os.environ["NCCL_HOSTID"] == "fusco-rank-1"


def test_launched_ranks_with_one_gpu_are_told_how_to_share_it(monkeypatch):
    for name, value in zip(VARIABLES, ("1", "2", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backends: None)
    with pytest.raises(ValueError, match=rf"rank 0 .* and rank 1 .* have the same GPU, gpu 0.*{SHARE_GPUS}=1 lets"):
        join_gpu_of(monkeypatch, "gpu 0", "gpu 0")
    join_gpu_of(monkeypatch, "gpu 0", "gpu 1")  # the launcher shows each rank its GPU only


def join_gpu_of(monkeypatch, *uuids):
    """Join as the last rank of this host, with the GPUs of all ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bootstrap, "uuid_of", lambda device: uuids[-1])

    def gather(found, local):
        host, device = local
        found[:] = [(host, replace(device, uuid=uuid if device.uuid else "")) for uuid in uuids]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    join_torchrun("cuda")


JOIN = """
import torch.distributed as dist
from fusco.bench.ranks.torchrun import join_torchrun
rank = join_torchrun("cpu")
print(rank.rank, dist.get_rank(), dist.get_world_size(), dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.multirank
def test_ranks_join():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={
                **os.environ,
                **dict(zip(VARIABLES, (str(rank), "2", str(rank), "2"), strict=True)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["0 0 2 gloo\n", "1 1 2 gloo\n"]

"""How ranks meet: who is where, and on which device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusco.control.bootstrap import DeviceIdentity, check_devices, exchange_peer_info
from fusco.control.fingerprint import CollectiveFingerprint
from store_gathers import on_ranks


def meet(devices, uuids, hosts=("a",) * 4):
    """What comes of it on each rank; ``uuids[name]`` is the GPU that a device's name stands for."""

    def meet_on(store_gather):
        met = exchange_peer_info(
            store_gather,
            CollectiveFingerprint("Communicator"),
            DeviceIdentity.of(torch.device(devices[store_gather.rank])),
        )
        check_devices(met)
        return [device.name for device in met.devices]

    # Threads share the stand-ins, so hosts come in the order in which ranks ask; those are equal, or all differ.
    with (
        mock.patch("fusco.control.bootstrap.uuid_of", lambda device: uuids[str(device)]),
        mock.patch("fusco.control.bootstrap.host_identity", side_effect=hosts),
        mock.patch("fusco.control.bootstrap.reachable_address", return_value="127.0.0.1"),
    ):
        return on_ranks(len(devices), meet_on)


@pytest.fixture(autouse=True)
def each_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)


def test_each_rank_has_a_gpu_of_its_own():
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    assert meet(devices, {"cuda:0": "A", "cuda:1": "B", "cuda:2": "C"}) == dict.fromkeys(range(3), devices)


def test_ranks_without_gpus_share_the_cpu():
    assert meet(["cpu"] * 3, {}) == dict.fromkeys(range(3), ["cpu"] * 3)


def test_gpus_of_one_name_on_different_machines():
    assert meet(["cuda:0"] * 2, {"cuda:0": "A"}, hosts=("a", "b")) == dict.fromkeys(range(2), ["cuda:0"] * 2)


@pytest.mark.parametrize(
    ("devices", "both"),
    [
        (["cuda:0", "cuda:0", "cuda:0"], r"rank 0 \(cuda:0\) and rank 1 \(cuda:0\)"),
        (["cuda:1", "cuda:0", "cuda:2"], r"rank 0 \(cuda:1\) and rank 2 \(cuda:2\)"),
    ],
)
def test_two_ranks_with_one_gpu_are_told_what_to_call(devices, both):
    for outcome in meet(devices, {"cuda:0": "A", "cuda:1": "B", "cuda:2": "B"}).values():
        with pytest.raises(ValueError, match=rf"{both} have the same GPU, [AB], .*set_device.*LOCAL_RANK"):
            raise outcome


def test_ranks_share_gpus_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert meet(["cuda:0"] * 2, {"cuda:0": "A"}) == dict.fromkeys(range(2), ["cuda:0"] * 2)

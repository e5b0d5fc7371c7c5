"""Ranks exchange hosts and devices, and reject a GPU that two of them have."""

from __future__ import annotations

import socket
import threading
from unittest import mock

import pytest
import torch

from fusco.control.bootstrap import DeviceIdentity, check_devices, exchange_peer_info, reachable_address
from fusco.control.fingerprint import CollectiveFingerprint
from store_gathers import on_ranks


def exchange(devices, uuids, hosts=("a",) * 4):
    """Return each rank's outcome; ``uuids[name]`` is the UUID of the GPU with that name."""

    def exchange_on(store_gather):
        peer_info = exchange_peer_info(
            store_gather,
            CollectiveFingerprint("Communicator"),
            DeviceIdentity.of(torch.device(devices[store_gather.rank])),
        )
        check_devices(peer_info, range(4, 4 + len(devices)))
        return [device.name for device in peer_info.devices]

    # Threads share the mocks, so hosts are given in the order in which ranks ask; they are all equal, or all differ.
    with (
        mock.patch("fusco.control.bootstrap.uuid_of", lambda device: uuids[str(device)]),
        mock.patch("fusco.control.bootstrap.host_identity", side_effect=hosts),
        mock.patch("fusco.control.bootstrap.reachable_address", return_value="127.0.0.1"),
    ):
        return on_ranks(len(devices), exchange_on)


@pytest.fixture(autouse=True)
def each_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)


def test_ranks_with_one_gpu_each():
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    assert exchange(devices, {"cuda:0": "A", "cuda:1": "B", "cuda:2": "C"}) == dict.fromkeys(range(3), devices)


def test_ranks_without_gpus_share_the_cpu():
    assert exchange(["cpu"] * 3, {}) == dict.fromkeys(range(3), ["cpu"] * 3)


def test_gpus_of_one_name_on_different_machines():
    assert exchange(["cuda:0"] * 2, {"cuda:0": "A"}, hosts=("a", "b")) == dict.fromkeys(range(2), ["cuda:0"] * 2)


@pytest.mark.parametrize(
    ("devices", "both"),
    [
        (["cuda:0", "cuda:0", "cuda:0"], r"rank 4 \(cuda:0\) and rank 5 \(cuda:0\)"),
        (["cuda:1", "cuda:0", "cuda:2"], r"rank 4 \(cuda:1\) and rank 6 \(cuda:2\)"),
    ],
)
def test_the_error_of_two_ranks_with_one_gpu_says_what_to_call(devices, both):
    for outcome in exchange(devices, {"cuda:0": "A", "cuda:1": "B", "cuda:2": "B"}).values():
        with pytest.raises(ValueError, match=rf"{both} have the same GPU, [AB], .*set_device.*LOCAL_RANK"):
            raise outcome


def test_ranks_share_gpus_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert exchange(["cuda:0"] * 2, {"cuda:0": "A"}) == dict.fromkeys(range(2), ["cuda:0"] * 2)


def test_a_name_that_is_not_resolved_does_not_hold_up_the_rank(monkeypatch):
    is_over, real = threading.Event(), socket.gethostbyname

    def resolve(name):
        return is_over.wait(60) and "127.0.0.1" if name == "storehost" else real(name)

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr("fusco.control.bootstrap._RESOLVING_S", 0.05)
    with pytest.warns(RuntimeWarning, match="the host name 'storehost' has not been resolved within 0.05 s"):
        address = reachable_address("storehost")
    is_over.set()
    assert address == reachable_address("192.0.2.1")  # by the default route


def test_a_name_that_resolves_to_this_host_gives_the_default_route(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", {"here": "127.0.0.1", "192.0.2.1": "192.0.2.1"}.__getitem__)
    assert reachable_address("here") == reachable_address("192.0.2.1")

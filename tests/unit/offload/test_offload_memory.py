"""Memory on relays: given back where it runs low, taken again, and bounded."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
from simulated_copiers import MB, Host
from simulated_gpus import GB

from fusco.core.errors import FuscoError, LaunchError, TransportError
from fusco.offload import RelayBudget, relay, shared_links
from fusco.offload.settings import NvmlError


def test_memory_that_runs_low_is_given_back_and_taken_again(host):
    budget = RelayBudget()
    copier = host.open(0, budget=budget)
    relay = copier.relays[0]
    assert relay.held_bytes == sum(size for _, size, _ in host.gpus.buffers.values()) + (512 << 20)
    copy = host.start(0, GB)
    host.step()
    host.gpus.links.free[1] = budget.low_bytes - 1
    copier.links.mover.drain_path(2), copier.links.mover.drain_path(3)
    borrowed = copy.borrowed_bytes
    while host.copiers[0].links.mover.drain_path(2):
        host.step()
    copier.links.keep()
    assert not host.gpus.buffers
    assert host.gpus.contexts[1001] == 0
    assert "given back when only 2,048 MiB were free" in copier.reason
    host.finish(copy)  # over its own link
    assert copy.borrowed_bytes == borrowed
    copier.links._next_try_s = 0.0
    copier.links.keep()
    assert "MiB of its memory are free, of 4,096 that must be" in copier.reason
    host.gpus.links.free[1], copier.links._next_try_s = 50 * GB, 0.0
    copier.links.keep()
    assert copier.reason == ""
    again = host.start(0, 256 * MB)
    host.finish(again)
    assert again.borrowed_bytes


def test_a_relay_that_did_not_drain_in_time_is_used_again(host, monkeypatch):
    copier, free = host.open(0), host.gpus.links.free
    copy, before = host.start(0, 64 * MB), free[1]
    copier.links.mover.step()  # chunks are on the relay
    monkeypatch.setattr(relay, "_DRAIN_S", 0.0)
    free[1] = RelayBudget().low_bytes - 1
    with pytest.raises(TransportError, match="did not end in 0 s"):
        copier.links.keep()
    free[1] = before
    host.finish(copy)
    for _ in range(2):  # given back, and taken again
        copier.links._next_try_s = 0.0
        copier.links.keep()
    assert copier.reason == ""
    again = host.start(0, 256 * MB)
    host.finish(again)
    assert again.borrowed_bytes


def test_memory_that_cannot_be_read_is_given_back_and_taken_again(host):
    copier, links = host.open(0), host.gpus.links
    read, links.free_bytes = links.free_bytes, mock.Mock(side_effect=NvmlError("nvmlDeviceGetMemoryInfo failed"))
    copier.links.keep()
    assert copier.reason == "GPU 1 is no relay: its memory was given back, since nvmlDeviceGetMemoryInfo failed"
    assert not host.gpus.buffers
    copier.links._next_try_s = 0.0
    copier.links.keep()
    assert copier.reason == "GPU 1 is no relay: nvmlDeviceGetMemoryInfo failed"
    links.free_bytes, copier.links._next_try_s = read, 0.0
    copier.links.keep()
    assert copier.reason == ""


def test_relays_are_watched_after_an_error(host, monkeypatch):
    links = host.open(0).links
    monkeypatch.setattr(shared_links, "_KEEP_S", 0.001)
    errors = iter([OSError("one"), OSError("one"), TransportError("other")])

    def keep():
        if (error := next(errors, None)) is not None:
            raise error
        links._is_ending.set()

    monkeypatch.setattr(links, "keep", keep)
    with pytest.warns(RuntimeWarning) as told:
        links._keep()
    assert [str(each.message).rpartition(": ")[2] for each in told] == ["one", "other"]


def test_everything_is_given_back_though_one_relay_fails(tmp_path):
    host = Host(tmp_path, 3)
    copier = host.open(0)
    closing = copier.relays[0]._resources.close
    copier.relays[0]._resources.close = mock.Mock(side_effect=LaunchError("it failed"))
    with pytest.raises(LaunchError, match="it failed"):
        copier.close()
    assert not any(relay.is_open for relay in copier.relays)
    assert {place for _, _, place in host.gpus.buffers.values()} == {1001}  # those of the relay that failed
    assert not host.board.exists()
    closing()


def test_a_watch_that_does_not_end_is_an_error_in_time(tmp_path):
    host, go_on = Host(tmp_path), threading.Event()
    copier = host.open(0, timeout_s=0.1)
    copier.links._keeper = stuck = threading.Thread(target=go_on.wait)
    stuck.start()
    with pytest.raises(
        FuscoError, match=r"GPU 0 could not give back its relays: .* did not end within 0.1 s; it waits"
    ):
        copier.close()
    assert all(relay.is_open for relay in copier.relays)
    go_on.set()
    stuck.join()
    copier.links.close()
    assert not any(relay.is_open for relay in copier.relays)


def test_the_budget_is_never_exceeded(tmp_path):
    host = Host(tmp_path)
    copier = host.open(0, budget=RelayBudget(max_bytes=100 * MB))
    assert copier.relays == ()
    assert copier.reason == "GPU 1 is no relay: relays may take 100 MiB there, and would take 544"
    assert not host.gpus.buffers
    assert host.gpus.contexts[1001] == 0
    host.close()
    many = Host(tmp_path, 4)
    assert sum(relay.is_open for relay in many.open(1, budget=RelayBudget(max_relays=2)).relays) == 2
    assert [relay.device for relay in many.copiers[1].relays if relay.is_open] == [2, 3]
    many.close()

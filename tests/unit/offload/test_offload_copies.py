"""Copies over several PCIe links, on simulated GPUs in virtual time."""

from __future__ import annotations

import ctypes
import os

import pytest
from hypothesis import given, settings, strategies as st
from simulated_copiers import MB, Host
from simulated_gpus import GB, PCIE, SimulatedGpus

from fusco.offload import Copier, OffloadSettings
from fusco.offload.mover import FROM_HOST, TO_HOST
from fusco.offload.settings import LINK_LIMITS
from fusco.rails.board import Board
from fusco.rails.policy import Limits

BOTH = pytest.mark.parametrize("direction", [TO_HOST, FROM_HOST])


@BOTH
@pytest.mark.parametrize("num_bytes", [256 * MB, GB + 12345])
def test_two_links_are_nearly_twice_as_fast_as_one(host, num_bytes, direction):
    host.open(0)
    copy = host.start(0, num_bytes, direction)
    speed = num_bytes / host.finish(copy)
    assert 1.9 <= speed / PCIE <= 2.0
    assert copy.reason == ""
    assert 0.45 < copy.borrowed_bytes / num_bytes < 0.52


@BOTH
@pytest.mark.parametrize("depth", [32, 48, 64])
def test_links_end_together_though_launches_are_long(tmp_path, direction, depth):
    host = Host(tmp_path, call_ns=3000)
    host.open(0, limits=Limits(direct_first=32, direct_depth=40, borrowed_per_rail=depth, batch=depth // 2))
    copy = host.start(0, 256 * MB, direction)
    assert 256 * MB / host.finish(copy) >= 1.95 * PCIE
    host.close()


def test_chunks_of_512_kb_with_the_time_that_calls_take(tmp_path):
    host = Host(tmp_path, call_ns=700)
    host.open(0)
    assert 256 * MB / host.finish(host.start(0, 256 * MB)) >= 1.7 * PCIE
    host.close()


def test_four_links(tmp_path):
    host = Host(tmp_path, 4)
    host.open(0)
    assert 256 * MB / host.finish(host.start(0, 256 * MB)) >= 3.7 * PCIE
    host.close()


@BOTH
def test_an_owner_that_comes_back_has_its_link_at_once(host, direction):
    host.open(0)
    host.open(1)
    borrower = host.start(0, 4 * GB, direction)
    for _ in range(200):
        host.step()
    assert borrower.borrowed_bytes > 0
    num_bytes = int(0.005 * PCIE)  # of five milliseconds
    assert num_bytes / host.finish(host.start(1, num_bytes, direction)) >= 0.9 * PCIE
    borrowed = borrower.borrowed_bytes
    owner = host.start(1, GB, direction)
    assert GB / host.finish(owner) >= 0.98 * PCIE
    assert borrower.borrowed_bytes == borrowed  # none while its owner copies
    for _ in range(400):
        host.step()
    assert borrower.borrowed_bytes > borrowed  # and again afterwards
    host.finish(borrower)


def test_both_directions_do_not_disturb_each_other(host):
    host.open(0)
    host.open(1)
    copies = [host.start(0, 512 * MB, TO_HOST), host.start(1, 512 * MB, FROM_HOST)]
    assert 512 * MB / host.finish(*copies) >= 1.9 * PCIE
    assert all(copy.borrowed_bytes for copy in copies)


def test_owners_that_are_both_busy_keep_their_links(host):
    host.open(0)
    host.open(1)
    copies = [host.start(0, GB), host.start(1, GB)]
    assert GB / host.finish(*copies) >= 0.97 * PCIE


def test_a_copy_by_relays_only_goes_on_while_their_owners_are_busy(host):
    host.open(0, own_link_by="nothing")
    host.open(1)
    owner, borrower = host.start(1, GB), host.start(0, 64 * MB)
    host.step()
    assert not owner.is_done
    host.finish(owner, borrower)
    assert borrower.borrowed_bytes == 64 * MB


def test_one_chunk_under_way(tmp_path):
    limits = Limits(direct_first=1, direct_depth=1, borrowed_per_rail=1, batch=16)
    host = Host(tmp_path)
    host.open(0, limits=limits, relays_by="nothing")
    host.open(1, limits=limits, relays_by="nothing")
    host.finish(host.start(0, 200 * MB), host.start(0, MB))  # launches of unequal sizes
    host.close()


def test_borrowers_share_one_bound(tmp_path):
    host = Host(tmp_path, 3)
    for device in (0, 1):
        host.open(device, relays=(2,))
    copies = [host.start(device, 256 * MB) for device in (0, 1)]
    with_board, most = Board(host.board), 0
    while not all(copy.is_done for copy in copies):
        host.step()
        borrowed = [with_board.cell(each.row, 4)[7] for each in with_board.workers()]
        most = max(most, sum(borrowed))
        assert sum(borrowed) <= LINK_LIMITS.borrowed_per_rail
    assert most == LINK_LIMITS.borrowed_per_rail
    assert all(copy.borrowed_bytes for copy in copies)
    with_board.close()
    host.close()
    assert not host.board.exists()


sizes = st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from([TO_HOST, FROM_HOST])), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(sizes, st.sampled_from([1, 3]))
def test_every_byte_arrives_once_and_after_earlier_work(tmp_path_factory, copies, depth):
    host = Host(tmp_path_factory.mktemp("board"), moves_bytes=True, pcie=1e9)
    limits = Limits(chunk_bytes=4096, direct_first=1, direct_depth=depth, borrowed_per_rail=depth)
    copier = host.open(0, limits=limits)
    before = [(os.urandom(num_bytes), direction) for num_bytes, direction in copies]
    device = [ctypes.create_string_buffer(data if not d else len(data), len(data)) for data, d in before]
    pinned = [ctypes.create_string_buffer(data if d else len(data), len(data)) for data, d in before]
    host.gpus.work(host.streams[0], 1e-5)
    start = host.gpus.now_ns + 10_000
    made = [
        copier.copy(d, *(ctypes.addressof(memory) for memory in pair), len(data))
        for (data, d), pair in zip(before, zip(device, pinned, strict=True), strict=True)
    ]
    host.finish(*made)
    assert all(call[-1] >= start for call in host.gpus.copied)
    for (data, d), to in zip(before, zip(pinned, device, strict=True), strict=True):
        assert to[d].raw == data
    over_pcie = sum(call[4] for call in host.gpus.copied if call[0] != "nvlink")
    assert over_pcie == sum(len(data) for data, _ in before)
    host.close()
    assert not host.gpus.buffers


def test_the_callers_stream_waits_for_the_copy_when_told_to(host):
    host.open(0)
    copy = host.start(0, 64 * MB)
    while host.copiers[0].links.mover.wait(copy._job, 2) < 2:  # all of it issued
        host.step()
    assert not copy.is_done
    copy.wait()
    tail = host.gpus.tails[host.streams[0]]
    host.finish(copy)
    last = max(call[-1] for call in host.gpus.copied)
    assert tail == last


def test_small_copies_take_the_own_link_and_their_owner_is_seen(tmp_path):
    host = Host(tmp_path)
    copier = host.open(0)
    copier.settings = OffloadSettings()
    copy = host.start(0, MB)
    assert copy.reason.startswith("copies of less than min_bytes, ")
    assert copier.links._board.cell(copier.links._board.row, 0)[2] > 0
    host.finish(copy)
    host.close()


def test_with_a_thread(tmp_path):
    gpus = SimulatedGpus(2, moves_bytes=True, pcie=1e15)
    with gpus.current(gpus.retain(0)):
        stream = gpus.new_stream()
    machine = gpus.machine(tmp_path / "board", lambda device: stream, has_threads=True)
    data = os.urandom(1 << 20)
    source, to = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(len(data))
    clock = [0]
    with Copier(0, OffloadSettings(min_bytes=0, limits=Limits(chunk_bytes=1 << 16)), machine) as copier:
        for _ in range(3):
            ctypes.memset(to, 0, len(data))
            gpus.now_ns += 10**9
            copy = copier.copy(TO_HOST, ctypes.addressof(source), ctypes.addressof(to), len(data), keeps=clock)
            while not copy.is_done:
                gpus.now_ns += 1000
            copy.synchronize()
            assert to.raw == data
            assert copy.borrowed_bytes
    assert gpus.faults == []
    assert not gpus.buffers


def test_a_gpu_that_only_lends_its_link(tmp_path):
    host = Host(tmp_path)
    host.open(0)
    lender = host.open(1, relays_by="nothing")
    assert lender.reason == "the settings borrow no link"
    copies = [host.start(0, 512 * MB), host.start(1, 512 * MB)]
    assert 512 * MB / host.finish(*copies) >= 0.96 * PCIE  # 16 MB were borrowed before it began
    assert copies[1].borrowed_bytes == 0
    assert 1002 not in host.gpus.contexts
    host.close()

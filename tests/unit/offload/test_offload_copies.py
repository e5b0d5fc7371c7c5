"""Copies over several PCIe links, on simulated GPUs in virtual time."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import threading
import weakref
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpus import GB, ILLEGAL_ADDRESS, PCIE, SimulatedGpus

from fusco.core import c_library
from fusco.core.errors import ClosedError, FuscoError, LaunchError, TransportError
from fusco.offload import Copier, OffloadSettings, RelayBudget, relay, shared_links
from fusco.offload.links import NvmlError
from fusco.offload.mover import DONE, FAILED, FROM_HOST, TO_HOST
from fusco.offload.settings import LINK_LIMITS
from fusco.rails.board import Board
from fusco.rails.limits import Limits

MB = 1 << 20
BOTH = pytest.mark.parametrize("direction", [TO_HOST, FROM_HOST])


class Host:
    """Copiers of a simulated host, each with a stream of its caller."""

    def __init__(self, folder, num_gpus=2, **how):
        self.gpus, self.board = SimulatedGpus(num_gpus, **how), folder / "board"
        self.copiers, self.streams = {}, {}

    def open(self, device, **settings):
        with self.gpus.current(self.gpus.retain(device)):
            self.streams[device] = self.gpus.new_stream()
        machine = self.gpus.machine(self.board, self.streams.__getitem__)
        self.copiers[device] = Copier(device, OffloadSettings(min_bytes=0, **settings), machine)
        return self.copiers[device]

    def start(self, device, num_bytes, direction=TO_HOST):
        return self.copiers[device].copy(direction, (device + 1) << 40, 1 << 50, num_bytes)

    def work(self):
        """Let the copiers do what they can do now."""
        while sum(copier.links.mover.step() for copier in self.copiers.values() if copier.links):
            pass
        assert self.gpus.faults == []

    def step(self):
        """Go on to the end of the next copy on a link."""
        self.work()
        self.gpus.advance()
        self.work()

    def finish(self, *copies):
        """Return the seconds until all copies are done."""
        start = self.gpus.now_ns
        while not all(copy.is_done for copy in copies):
            self.step()
        return (self.gpus.now_ns - start) / 1e9

    def close(self):
        for copier in self.copiers.values():
            copier.close()


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()


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


@pytest.mark.parametrize("limit_s", [1e10, math.inf])  # 2**63 ns and more
def test_the_limit_of_a_wait_may_be_any_number(host, limit_s):
    host.open(0)
    copy, waited = host.start(0, 64 * MB), []

    def wait():
        try:
            copy.synchronize(limit_s)
            waited.append(None)
        except (FuscoError, OverflowError) as error:
            waited.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert not waited
    host.finish(copy)
    waiting.join(10)
    assert waited == [None]


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
    copier._links._keeper = stuck = threading.Thread(target=go_on.wait)
    stuck.start()
    with pytest.raises(
        FuscoError, match=r"GPU 0 could not give back its relays: .* did not end within 0.1 s; it waits"
    ):
        copier.close()
    assert all(relay.is_open for relay in copier.relays)
    go_on.set()
    stuck.join()
    copier._links.close()
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


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        (lambda gpus: setattr(gpus, "num_gpus", 1), {}, "this process sees one GPU"),
        (lambda gpus: None, {"relays": ()}, "the settings name no relay"),
        (lambda gpus: setattr(gpus.links, "has_nvlink", lambda *_: False), {}, "GPU 0 has no access over NVLink"),
        (lambda gpus: setattr(gpus.links, "free", [GB] * 2), {}, "only 1,024 MiB of its memory are free"),
    ],
)
def test_without_a_relay_it_is_one_plain_copy_and_says_why(tmp_path, capsys, change, settings, reason):
    host = Host(tmp_path)
    change(host.gpus)
    copier = host.open(0, **settings)
    assert reason in copier.reason
    assert "\n" not in copier.reason
    copy = host.start(0, 512 * MB)
    assert reason in copy.reason
    assert [call[:2] for call in host.gpus.copied] == [("to host", 0)]
    assert host.finish(copy) == pytest.approx(512 * MB / PCIE, rel=0.001)
    host.close()
    assert not host.board.exists()


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(c_library, "_COMPILERS", ("no-such-compiler",))
    c_library.load_c_library.cache_clear()
    host = Host(tmp_path)
    assert "mover needs a C compiler, and none of no-such-compiler is installed" in host.open(0).reason
    host.close()
    c_library.load_c_library.cache_clear()


def test_small_copies_take_the_own_link_and_their_owner_is_seen(tmp_path):
    host = Host(tmp_path)
    copier = host.open(0)
    copier.settings = OffloadSettings()
    copy = host.start(0, MB)
    assert copy.reason.startswith("copies of less than min_bytes, ")
    assert copier.links._board.cell(copier.links._row.row, 0)[2] > 0
    host.finish(copy)
    host.close()


def test_a_failure_of_cuda_ends_all_copies(host):
    copier = host.open(0)
    copies = [host.start(0, 64 * MB), host.start(0, 64 * MB, FROM_HOST)]
    host.step()
    host.gpus.error = ILLEGAL_ADDRESS
    copier.links.mover.step()
    host.gpus.error = 0
    words = r"GPU 0: a copy of 67,108,864 bytes to host memory failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    with pytest.raises(LaunchError, match=words):
        copies[0].synchronize()
    with pytest.raises(LaunchError, match="from host memory failed"):
        copies[1].wait()
    assert [copier.links._board.cell(copier.links._row.row, rail)[7] for rail in range(4)] == [0] * 4
    later = host.start(0, 32 * MB)  # raises no error of others, but its own
    assert list(copier._under_way) == [later]
    with pytest.raises(LaunchError, match="a copy of 33,554,432 bytes to host memory failed"):
        later.synchronize()
    copier.reap()
    assert not copier._under_way


def test_a_plain_copy_that_fails(tmp_path):
    host = Host(tmp_path)
    host.open(0, relays=())
    copy = host.start(0, MB)
    with mock.patch.object(host.gpus, "is_complete", side_effect=LaunchError("cuEventQuery failed")):
        with pytest.raises(LaunchError, match="cuEventQuery failed"):
            copy.synchronize()
        later = host.start(0, MB)
    host.finish(later)
    host.close()


def test_every_wait_has_a_limit_and_says_for_what(host):
    host.open(0)
    host.gpus.work(host.streams[0], 100.0)
    copy = host.start(0, 64 * MB)
    with pytest.raises(TransportError, match=r"is not done after 0\.01 s; it waits for earlier work of its stream"):
        copy.synchronize(0.01)
    second = Host(host.board.parent, 2)
    second.open(0)
    stuck = second.start(0, 64 * MB)
    second.copiers[0].links.mover.step()
    with pytest.raises(TransportError, match="it waits for chunks on gpu0 to host, gpu1 to host; 0 bytes are done"):
        stuck.wait(0.01)
    second.finish(stuck)
    second.close()
    host.copiers[0]._under_way.clear()


def test_a_closed_copier(tmp_path):
    host = Host(tmp_path)
    copier = host.open(0)
    copy = host.start(0, 64 * MB)
    host.finish(copy)
    copier.close()
    copier.close()
    assert copy.is_done
    with pytest.raises(ClosedError, match="GPU 0: the copier was closed"):
        host.start(0, MB)
    assert not host.gpus.buffers
    assert not host.board.exists()
    assert host.gpus.contexts == {1000: 1, 1001: 0}  # the caller's


def test_the_memory_of_a_copy_that_does_not_end_is_not_freed(host):
    class Kept:
        """A tensor of a copy."""

    copier, kept = host.open(0, timeout_s=0.01), Kept()
    host.gpus.work(host.streams[0], 100.0)
    copier.copy(TO_HOST, 1 << 40, 1 << 50, 64 * MB, kept)
    reference = weakref.ref(kept)
    del kept
    with pytest.raises(TransportError, match="it waits for earlier work of its stream"):
        copier.close()
    gc.collect()
    assert reference() is not None


def test_a_copier_that_is_closed_while_another_thread_waits(tmp_path):
    host = Host(tmp_path)
    mover = host.open(0).links.mover
    copy = host.start(0, 64 * MB)
    closing = threading.Thread(target=mover.close)
    with mover._using():
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        assert mover.wait(copy._job, DONE) == FAILED  # to those that come later it is closed
    closing.join()
    assert mover.drain_path(0) == 0
    host.copiers[0]._under_way.clear()
    copy._was_done = True
    host.close()


def test_a_killed_process_holds_neither_its_link_nor_what_it_borrowed(tmp_path):
    host = Host(tmp_path)
    host.open(1)
    child = os.fork()
    if not child:
        other = Host(tmp_path)
        other.open(0)
        other.start(0, GB)
        other.copiers[0].links.mover.step()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    board = Board(host.board)
    assert board.cell(1, 2)[7] == LINK_LIMITS.borrowed_per_rail  # borrowed by the dead
    host.copiers[1].links.keep()
    assert [each.row for each in board.workers()] == [0]
    assert board.cell(1, 2)[7] == 0
    copy = host.start(1, 256 * MB)
    assert 256 * MB / host.finish(copy) >= 1.9 * PCIE
    board.close()
    host.close()
    assert not host.board.exists()


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


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"relays_by": "magic"}, "relays_by must be one of copy-engines, threads, nothing, got 'magic'"),
        ({"relays_by": "nothing", "own_link_by": "nothing"}, "must not both be 'nothing'"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"limits": Limits(borrowed_per_rail=100)}, "must be at most 64, got 4, 100"),
        ({"min_bytes": -1}, "min_bytes must"),
    ],
)
def test_settings_that_cannot_be(wrong, error):
    with pytest.raises(ValueError, match=error):
        OffloadSettings(**wrong)


def test_relays_that_cannot_be(tmp_path):
    host = Host(tmp_path)
    with pytest.raises(
        ValueError, match=r"relays of GPU 0 must be other GPUs among the 2 of this process, got \[0, 2\]"
    ):
        host.open(0, relays=(0, 1, 2))
    assert host.gpus.contexts[1000] == 1  # of the host; the copier has given its own back
    with pytest.raises(ValueError, match="high_bytes must be at least low_bytes"):
        RelayBudget(high_bytes=MB)

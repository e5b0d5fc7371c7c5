"""Copies without relays, failures, limits of waits, and arguments that are refused."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import weakref
from unittest import mock

import pytest
from simulated_copiers import MB, Host
from simulated_gpus import GB, ILLEGAL_ADDRESS, PCIE

from fusco.core import c_library
from fusco.core.errors import ClosedError, FuscoError, LaunchError, TransportError
from fusco.offload import OffloadSettings, RelayBudget
from fusco.offload.mover import DONE, FAILED, FROM_HOST, TO_HOST
from fusco.offload.settings import LINK_LIMITS
from fusco.rails.board import Board
from fusco.rails.policy import Limits


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
    assert [copier.links._board.cell(copier.links._board.row, rail)[7] for rail in range(4)] == [0] * 4
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


@pytest.mark.parametrize(("fails", "relays"), [("copy", ()), ("record", ()), ("record", None)])
def test_copies_that_cannot_begin_use_up_no_events(tmp_path, relays, fails):
    host = Host(tmp_path)
    copier = host.open(0, relays=relays)
    host.finish(host.start(0, MB))
    copier.reap()
    num_events = len(host.gpus.events)
    with mock.patch.object(host.gpus, fails, side_effect=LaunchError("out of memory")):
        for _ in range(3):
            with pytest.raises(LaunchError, match="out of memory"):
                host.start(0, MB)
    host.finish(host.start(0, MB))
    assert len(host.gpus.events) == num_events
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

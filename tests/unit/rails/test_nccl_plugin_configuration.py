"""Compiling and configuring the plugin for NCCL; mistakes are told with the variable and its value."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from plugin_rig import RAILS, descriptors_left, pairs, settle, started

from fusco.bench.rails.plugin import SYSTEM_ERROR, Plugin, PluginError
from fusco.core.cache import CacheFolder
from fusco.core.errors import CompileError
from fusco.rails import Limits, Rail, nccl_plugin
from fusco.rails.binding import library_path
from fusco.rails.board import Board
from fusco.rails.nccl import why_not_nccl


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FUSCO_NCCL_RAILS", "", "FUSCO_NCCL_RAILS: it names no rail; fusco.rails.nccl_plugin"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1", "a rail is interface,address,bit/s,owners"),
        ("FUSCO_NCCL_RAILS", "lo,nowhere,0,1", "no IP address"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1,0,1;lo,::1,0,2", "IPv4 and IPv6 addresses are mixed"),
        ("FUSCO_NCCL_RAILS", ";".join(f"lo,127.0.0.{i + 1},0,1" for i in range(17)), "more than 16 rails"),
        ("FUSCO_NCCL_RAILS", "lo,198.51.100.7,0,1", "cannot listen on lo, 198.51.100.7: Cannot assign"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1,fast,1", "the bit/s of a rail are not a number"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1,0,me", "an owner of a rail is not the number of a worker"),
        ("FUSCO_NCCL_WORKER", "7", "owns no rail .worker 7"),
        ("FUSCO_NCCL_WORKER", "one", "FUSCO_NCCL_WORKER: it is not the number of a worker.*FUSCO_NCCL_WORKER=one"),
        ("FUSCO_NCCL_WORKER", "65536", "it is not the number of a worker, from 0 to 65535"),
        ("FUSCO_NCCL_WORKER", "-1", "it is not the number of a worker"),
        ("FUSCO_NCCL_TIMEOUT_S", "soon", "FUSCO_NCCL_TIMEOUT_S: it is not a positive number of seconds.*=soon"),
        ("FUSCO_NCCL_TIMEOUT_S", "0", "it is not a positive number of seconds"),
        ("FUSCO_NCCL_THREADS", "9", "it is not a number of threads from 1 to 8"),
        ("FUSCO_NCCL_POLICY", "rule=quick", "none of the values that it may have"),
        ("FUSCO_NCCL_LIMITS", "chunk_bytes=0", "a field is not a positive number"),
        ("FUSCO_NCCL_LIMITS", "chunk_bytes=64k", "a field is not a positive number"),
        ("FUSCO_NCCL_LIMITS", "stall_s=x", "a field is not a positive number"),
        ("FUSCO_NCCL_LIMITS", "direct_depth=99", "more than 32 chunks"),
        ("FUSCO_NCCL_LIMITS", "speed=3", "is the name of a field, = and a value"),
        ("FUSCO_NCCL_BOARD", "/nowhere/board", "cannot open the board of rails /nowhere/board: No such file"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path, monkeypatch, name, value, text):
    for key, given in nccl_plugin(RAILS, worker=1, policy="direct", limits=None, board=tmp_path / "b").items():
        monkeypatch.setenv(key, given)
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=text) as error:
        Plugin(str(library_path()))
    assert error.value.code == SYSTEM_ERROR
    assert not (tmp_path / "b").exists()


def test_it_is_compiled_once_and_problems_are_told(tmp_path, monkeypatch):
    folder = CacheFolder(tmp_path, tmp_path)
    path = library_path(folder, ("-O0",))
    before = path.stat().st_mtime_ns
    assert library_path(folder, ("-O0",)).stat().st_mtime_ns == before
    with pytest.raises(CompileError, match=r"does not compile with .*no-such-flag"):
        library_path(folder, ("--no-such-flag",))
    with (
        pytest.warns(UserWarning, match="read-only"),
        pytest.raises(CompileError, match="read-only; set FUSCO_CACHE_DIR"),
    ):
        library_path(CacheFolder(tmp_path / "none", None, "read-only"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="none of cc, gcc, clang is installed"):
        library_path(folder)


def test_the_environment_that_nccl_needs(monkeypatch):
    rails = [Rail("eth0", "10.0.0.1", (0, 2), 10**10), Rail("eth1", "10.0.1.1", (1, 3))]
    chosen = nccl_plugin(rails, worker=2, board=Path("/dev/shm/b"), limits=Limits(batch=3))
    assert Path(chosen["NCCL_NET_PLUGIN"]).is_file()
    assert chosen["NCCL_NET"] == "fusco"
    assert chosen["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
    more = [Rail("eth0", f"10.0.0.{i}", (i,)) for i in range(1, 11)]
    for given, channels in ((rails, "2"), (more[:4], "4"), (more, "8")):
        variables = nccl_plugin(given, worker=None, policy="direct", limits=None, board=None)
        assert variables["NCCL_NCHANNELS_PER_NET_PEER"] == variables["NCCL_MIN_P2P_NCHANNELS"] == channels
    assert chosen["FUSCO_NCCL_RAILS"] == "eth0,10.0.0.1,10000000000,0+2;eth1,10.0.1.1,0,1+3"
    assert (chosen["FUSCO_NCCL_WORKER"], chosen["FUSCO_NCCL_BOARD"]) == ("2", "/dev/shm/b")
    assert "batch=3" in chosen["FUSCO_NCCL_LIMITS"]
    assert "bound=worker,monitor=completion" in nccl_plugin(rails, policy="fuselink-paper")["FUSCO_NCCL_POLICY"]
    with pytest.raises(ValueError, match=r"policy must be one of fuselink, .*, got 'quick'"):
        nccl_plugin(rails, policy="quick")
    monkeypatch.setattr("fusco.rails.nccl.nccl_version", lambda: (2, 21, 5))
    with pytest.raises(ValueError, match=r"the plugin is for NCCL 2.27 to 2.30, and this torch's is 2.21.5"):
        nccl_plugin(rails)
    assert why_not_nccl((2, 31, 0)).endswith("2.31.0")


def test_a_bad_local_rank_matters_only_without_a_worker(tmp_path, monkeypatch):
    chosen = nccl_plugin(RAILS, worker=1, policy="direct", limits=None, board=tmp_path / "b")
    for key, given in {**chosen, "LOCAL_RANK": "first"}.items():
        monkeypatch.setenv(key, given)
    Plugin(str(library_path())).finalize()
    monkeypatch.delenv("FUSCO_NCCL_WORKER")
    with pytest.raises(PluginError, match=r"LOCAL_RANK: it is not the number of a worker.*LOCAL_RANK=first"):
        Plugin(str(library_path()))


def test_without_descriptors_it_does_not_start_and_leaves_nothing(tmp_path):
    """It needs 9 for three rails and two threads, and one more to read when its process began."""
    with started(tmp_path) as plugin:
        plugin.finalize()
        arguments = (ctypes.byref(ctypes.c_void_p()), 1, None, plugin.logger, None)
        before = len(os.listdir("/proc/self/fd"))
        for num in range(9):
            del plugin.log[:]
            with descriptors_left(num), pytest.raises(PluginError) as error:
                plugin.call(plugin.table.init, *arguments)
            assert error.value.code == SYSTEM_ERROR
            assert plugin.log[-1].endswith("Too many open files"), num
            assert len(os.listdir("/proc/self/fd")) == before
            assert not (tmp_path / "b").exists(), num
        plugin.call(plugin.table.init, *arguments)
        with pairs(plugin) as [(sender, receiver)]:
            settle([sender.isend(b"now"), receiver.irecv(bytearray(3))], sender, receiver)


def test_living_workers_keep_their_rows_while_a_process_is_out_of_descriptors(tmp_path):
    board = Board(tmp_path / "b")
    board.register(0, 1, RAILS)
    with started(tmp_path):
        with descriptors_left(0):
            time.sleep(0.6)  # rows of the dead are reset every 0.25 s
            board.reset_dead()
        assert [each.worker for each in board.workers()] == [0, 1]
    board.close()


def test_a_signal_while_the_board_is_locked(tmp_path):
    """Registering waits for the lock, through signals whose handlers interrupt system calls."""
    board, seen = Board(tmp_path / "b"), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    fcntl.flock(board.fd, fcntl.LOCK_EX)
    released = threading.Timer(0.2, fcntl.flock, (board.fd, fcntl.LOCK_UN))
    released.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with started(tmp_path):
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert seen
            assert [each.worker for each in board.workers()] == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        released.join()
    board.close()


def test_a_board_whose_path_is_long(tmp_path):
    folder = tmp_path / ("long" * 50) / ("path" * 50)
    folder.mkdir(parents=True)
    with started(folder):
        assert (folder / "b").stat().st_size

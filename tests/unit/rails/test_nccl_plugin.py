"""The plugin for NCCL, driven as NCCL drives it, over loopback addresses; peers are itself and Python endpoints.

``PLUGIN_FLAGS`` adds flags of the compiler, such as those of sanitizers (``make sanitize``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from fusco.bench.rails import plugin as driver
from fusco.bench.rails.plugin import INVALID_USAGE, REMOTE_ERROR, SYSTEM_ERROR, Plugin, PluginChannel, PluginError
from fusco.core.cache import CacheFolder
from fusco.core.errors import CompileError
from fusco.rails import Address, Endpoint, Limits, Rail, nccl_plugin
from fusco.rails.board import BORROWED, COMPLETED, POSTED, RX_BYTES, TX_BYTES, Board
from fusco.rails.handshake import Handshake, Introduction
from fusco.rails.nccl import environment_of_plugin, plugin_path, why_not_nccl
from fusco.rails.wire import ACK, BYE, DATA, GRANT, RAIL_DOWN, TOO_LARGE, Record, pack

RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
LIMITS = Limits(chunk_bytes=64 * 1024, no_rail_s=1.0)
FLAGS = os.environ.get("PLUGIN_FLAGS", "").split()
SOME = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)


def message(number, size):
    """Bytes by number, of a size below 2 MB."""
    start = number * 7919 % (2 << 20)
    return SOME[start : start + size]


@contextmanager
def started(tmp_path, version=11, rails=RAILS, name="b", **options):
    chosen = environment_of_plugin(
        rails, **{"worker": 1, "policy": "fuselink", "limits": LIMITS, "board": tmp_path / name, **options}
    )
    with pytest.MonkeyPatch.context() as patch:
        for key, value in chosen.items():
            patch.setenv(key, value)
        patch.setenv("FUSCO_NCCL_THREADS", "2")
        plugin = Plugin(str(plugin_path(flags=FLAGS)), version)
        try:
            yield plugin
        finally:
            plugin.finalize()


@contextmanager
def pairs(plugin, num=1):
    """Senders and their receivers, all comms of this process."""
    ends = []
    for _ in range(num):
        handle, listen = plugin.listen()
        sender = plugin.connect(handle)
        receiver = plugin.accept(listen)
        plugin.call(plugin.table.closeListen, listen)
        ends.append((PluginChannel(plugin, sender, is_sender=True), PluginChannel(plugin, receiver, is_sender=False)))
    try:
        yield ends
    finally:
        for sender, receiver in ends:
            sender.close()
            receiver.close()


def settle(requests, *channels, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not all(each.done for each in requests):
        assert time.monotonic() < end, [each.done for each in requests]
        for channel in channels:
            channel.progress()
        time.sleep(20e-6)


def address_of(handle):
    """The address by which a Python endpoint connects to a handle; see ``struct handle``."""
    raw = handle.raw
    port, num_rails = int.from_bytes(raw[54:56], "little"), raw[56]
    rails = [(socket.inet_ntoa(raw[58 + 4 * i : 62 + 4 * i]), port) for i in range(num_rails)]
    worker, chunk_bytes = int.from_bytes(raw[52:54], "little"), int.from_bytes(raw[48:52], "little")
    return Address(worker, chunk_bytes, tuple(rails), raw[16:48])


@contextmanager
def python_sender(tmp_path, plugin):
    """A channel of a Python endpoint of another host, and the plugin's receiver of what it sends."""
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS, timeout_s=20.0) as endpoint:
        handle, listen = plugin.listen()
        channel = endpoint.connect(address_of(handle))
        receiver = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
        yield channel, receiver
        plugin.call(plugin.table.closeListen, listen)
        receiver.close()


def offsets(structure):
    return {name: getattr(structure, name).offset for name, _ in structure._fields_}


def test_tables_have_the_layout_of_nccl():
    # NCCL 2.28's src/include/plugin/net/net_v10.h and net_v11.h, by a compiled sizeof and offsetof.
    sizes = [ctypes.sizeof(each) for each in (driver.TableV10, driver.PropertiesV10)]
    assert sizes == [160, 104]
    assert [ctypes.sizeof(each) for each in (driver.TableV11, driver.PropertiesV11)] == [176, 112]
    fields = {"pciPath": 8, "guid": 16, "ptrSupport": 24, "speed": 36, "latency": 44, "maxComms": 48, "vProps": 64}
    assert fields.items() <= offsets(driver.PropertiesV10).items()
    assert offsets(driver.PropertiesV11)["maxMultiRequestSize"] == 104
    assert offsets(driver.PropertiesV10)["maxCollBytes"] == 96
    functions = {"init": 8, "connect": 40, "isend": 80, "irecv": 88, "test": 104, "closeListen": 128}
    for table in (driver.TableV10, driver.TableV11):
        assert functions.items() <= offsets(table).items()
    assert offsets(driver.TableV11)["finalize"] == 160


def in_a_fork(function, *arguments):
    """Call a function in a child, which exits as a process does; NCCL before 2.28 does not say when it is done."""
    pid = os.fork()
    if not pid:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  told to the parent
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        ctypes.CDLL(None).exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("version", [10, 11])
def test_a_version_sends_and_receives(tmp_path, version):
    in_a_fork(sends_and_receives, tmp_path, version)
    assert not (tmp_path / "b").exists()


def sends_and_receives(tmp_path, version):
    sizes = [0, 1, 65536, 65537, 1_000_000, 3]
    with started(tmp_path, version) as plugin:
        properties = (driver.PropertiesV11 if version == 11 else driver.PropertiesV10)()
        plugin.call(plugin.table.getProperties, 0, ctypes.byref(properties))
        assert (plugin.table.name, properties.name, properties.ptrSupport) == (b"fusco", b"rails", 1)
        assert (properties.maxRecvs, properties.vProps.ndevs, properties.speed) == (1, 1, 30000)
        plugin.call(plugin.table.devices, ctypes.byref(num := ctypes.c_int()))
        assert num.value == 1
        with pairs(plugin) as [(sender, receiver)]:
            buffers = [bytearray(size + 5) for size in sizes]
            receives = [receiver.irecv(each) for each in buffers]
            sends = [sender.isend(message(i, size)) for i, size in enumerate(sizes)]
            settle([*sends, *receives], sender, receiver)
            assert [each.wait() for each in receives] == sizes
            for i, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
                assert buffer == message(i, size).tobytes() + bytes(5)


def test_sends_wait_for_credit_and_32_may_be_under_way(tmp_path):
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, receiver)]:
        sends = [sender.isend(message(i, 1000 + i)) for i in range(40)]
        for _ in range(200):
            sender.progress()
        assert [bool(each.handle.value) for each in sends] == [True] * 32 + [False] * 8
        assert not any(each.done for each in sends)
        buffers = [bytearray(2000) for _ in sends]
        receives = [receiver.irecv(each) for each in buffers]
        for _ in range(50):
            receiver.progress()
        assert sum(bool(each.handle.value) for each in receives) >= 32
        settle([*sends, *receives], sender, receiver)
        for i, (receive, buffer) in enumerate(zip(receives, buffers, strict=True)):
            assert buffer[: receive.wait()] == message(i, 1000 + i).tobytes()


def test_ten_thousand_random_sends_on_several_communicators(tmp_path):
    rng = np.random.default_rng(1)
    sizes = np.minimum(rng.lognormal(8, 2.0, 10_000), 1_000_000).astype(int) * (rng.random(10_000) > 0.02)
    with started(tmp_path) as plugin, pairs(plugin, 4) as ends:
        for begin in range(0, len(sizes), 400):
            batch = range(begin, begin + 400)
            buffers = [np.full(sizes[i] + 3, 0xA5, np.uint8) for i in batch]
            receives = [ends[i % 4][1].irecv(each) for i, each in zip(batch, buffers, strict=True)]
            sends = [ends[i % 4][0].isend(message(i, sizes[i])) for i in batch]
            settle([*sends, *receives], *(end for pair in ends for end in pair))
            for i, buffer, receive in zip(batch, buffers, receives, strict=True):
                assert receive.wait() == sizes[i]
                assert np.array_equal(buffer[:-3], message(i, sizes[i])), i
                assert (buffer[-3:] == 0xA5).all()
        board = Board(tmp_path / "b")
        (worker,) = board.workers()
        assert (worker.worker, worker.pid, worker.direct) == (1, os.getpid(), 0b010)
        end = time.monotonic() + 5.0
        while True:  # copies of late chunks may still be under way
            cells = [board.cell(worker.row, rail) for rail in range(3)]
            if [cell[POSTED] - cell[COMPLETED] for cell in cells] == [cell[BORROWED] for cell in cells] == [0, 0, 0]:
                break
            assert time.monotonic() < end, cells
            time.sleep(0.01)
        assert sum(cell[RX_BYTES] for cell in cells) == sizes.sum() <= sum(cell[TX_BYTES] for cell in cells)
        assert min(cell[TX_BYTES] for cell in cells) > 0
        board.close()


def test_a_message_larger_than_its_receive(tmp_path):
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, receiver)]:
        requests = [sender.isend(bytes(100)), receiver.irecv(bytearray(99))]
        after = [sender.isend(b"next"), receiver.irecv(buffer := bytearray(4))]
        settle([*requests, *after], sender, receiver)
        for each in requests:
            with pytest.raises(PluginError, match="100") as error:
                each.wait()
            assert error.value.code == INVALID_USAGE
        assert (after[1].wait(), buffer) == (4, b"next")


@pytest.mark.parametrize("closes", ["sender", "receiver"])
def test_closing_in_the_middle(tmp_path, closes):
    data, buffers = message(0, 2_000_000), [bytearray(2_000_000) for _ in range(3)]
    with started(tmp_path) as plugin, pairs(plugin, 2) as ends:
        sender, receiver = ends.pop(0)
        receives = [receiver.irecv(each) for each in buffers]
        sends = [sender.isend(data) for _ in range(5)]
        settle(receives[:1], sender, receiver)
        first, (others, stays) = (
            (sender, (receives[1:], receiver)) if closes == "sender" else (receiver, (sends, sender))
        )
        first.close()  # the memory of its requests is the caller's again
        copies = [bytes(each) for each in buffers] if closes == "receiver" else []
        others = [each for each in others if not each.done]
        settle(others, stays, limit_s=3.0)
        codes = [each.error.code for each in others]
        assert codes[-1] == REMOTE_ERROR
        assert set(codes) <= {0, REMOTE_ERROR}
        if closes == "receiver":
            assert [bytes(each) for each in buffers] == copies
        stays.progress()
        assert any("the peer has closed its end" in line for line in plugin.log)
        stays.close()
        sent, got = ends[0][0].isend(data), ends[0][1].irecv(buffers[0])  # the other communicator goes on
        settle([sent, got], *ends[0])
        assert buffers[0] == data.tobytes()


def test_a_communicator_that_was_never_accepted(tmp_path):
    with started(tmp_path) as plugin:
        handle, listen = plugin.listen()
        sender = PluginChannel(plugin, plugin.connect(handle), is_sender=True)
        sent = sender.isend(b"to no one")
        sender.progress()
        plugin.call(plugin.table.closeListen, listen)
        settle([sent], sender, limit_s=3.0)
        assert sent.error.code == REMOTE_ERROR
        sender.close()


PEER = """
import os, sys, time
from fusco.bench.rails.plugin import Plugin, PluginChannel
plugin = Plugin(os.environ["NCCL_NET_PLUGIN"])
handle, listen = plugin.listen()
sys.stdout.write(handle.raw.hex() + "\\n")
sys.stdout.flush()
receiver = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
buffer = bytearray(4 << 20)
receives = [receiver.irecv(buffer) for _ in range(1000)]
end = time.monotonic() + 30  # if the test fails before it kills this process
while time.monotonic() < end:
    receiver.progress()
"""


def test_a_killed_peer_and_what_it_leaves(tmp_path):
    theirs = environment_of_plugin(RAILS, worker=0, policy="fuselink", limits=LIMITS, board=tmp_path / "b")
    theirs["NCCL_NET_PLUGIN"] = str(plugin_path(flags=FLAGS))
    with started(tmp_path) as plugin:
        process = subprocess.Popen(
            [sys.executable, "-c", PEER], env={**os.environ, **theirs}, stdout=subprocess.PIPE, text=True
        )
        handle = ctypes.create_string_buffer(bytes.fromhex(process.stdout.readline()), 128)
        sender = PluginChannel(plugin, plugin.connect(handle), is_sender=True)
        sends = [sender.isend(message(i, 1 << 20)) for i in range(1000)]
        settle(sends[:20], sender)
        process.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        settle(sends[-1:], sender, limit_s=5.0)
        assert time.monotonic() - begin < LIMITS.no_rail_s + 1.0
        with pytest.raises(PluginError, match=r"lost worker 0 of another host: .*rail 2 \(lo, 127.0.0.3\)") as error:
            sends[-1].wait()
        assert error.value.code == REMOTE_ERROR
        sender.close()
        process.communicate()
        board = Board(tmp_path / "b")
        end = time.monotonic() + 3.0
        while [each.pid for each in board.workers()] != [os.getpid()]:  # its row is reset by the living
            assert time.monotonic() < end
            time.sleep(0.02)
        board.close()
    assert not (tmp_path / "b").exists()


EXITS = """
import os, threading
from fusco.bench.rails.plugin import Plugin, PluginChannel
plugin = Plugin(os.environ["NCCL_NET_PLUGIN"])
handle, listen = plugin.listen()
sender = PluginChannel(plugin, plugin.connect(handle), is_sender=True)
receiver = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
buffer = bytearray(4 << 20)

def work():  # as a thread of NCCL, which does not end before the process
    while True:
        requests = [receiver.irecv(buffer), sender.isend(b"words")]
        sender.progress(), receiver.progress()

threading.Thread(target=work, daemon=True).start()
receiver.irecv(buffer)
"""


def test_a_process_that_ends_with_open_communicators(tmp_path):
    theirs = environment_of_plugin(RAILS, worker=0, policy="fuselink", limits=LIMITS, board=tmp_path / "b")
    theirs["NCCL_NET_PLUGIN"] = str(plugin_path(flags=FLAGS))
    ended = subprocess.run(
        [sys.executable, "-c", EXITS],
        check=False,
        env={**os.environ, **theirs},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "b").exists()


def test_the_board_of_a_host_whose_workers_were_all_killed_goes_with_its_next_user(tmp_path):
    pid = os.fork()
    if not pid:
        with started(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    board = Board(tmp_path / "b")
    assert [each.pid for each in board.workers()] == [pid]
    board.close()
    assert not (tmp_path / "b").exists()


def test_a_listen_that_is_gone(tmp_path):
    with started(tmp_path, timeout_s=0.5) as plugin:
        handle, listen = plugin.listen()
        plugin.call(plugin.table.closeListen, listen)
        with pytest.raises(PluginError, match="no rail could be connected") as error:
            plugin.connect(handle)
        assert error.value.code == REMOTE_ERROR
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1].to_bytes(2, "little")
        nothing = ctypes.create_string_buffer(handle.raw[:54] + port + handle.raw[56:], 128)
        with pytest.raises(PluginError, match=r"it listens no more.*Connection refused"):
            plugin.connect(nothing)
        with pytest.raises(PluginError, match="its handle is none of theirs") as error:
            plugin.connect(ctypes.create_string_buffer(bytes(128), 128))
        assert error.value.code == INVALID_USAGE


def test_memory_of_a_gpu_is_refused(tmp_path):
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, _)]:
        memory = ctypes.c_void_p()
        plugin.call(plugin.table.regMr, sender.comm, None, 8, 1, ctypes.byref(memory))
        plugin.call(plugin.table.deregMr, sender.comm, memory)
        with pytest.raises(PluginError, match="rails move host memory"):
            plugin.call(plugin.table.regMr, sender.comm, None, 8, 2, ctypes.byref(memory))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FUSCO_NCCL_RAILS", "", "FUSCO_NCCL_RAILS: it is not set; fusco.rails.nccl_plugin"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1", "a rail is interface,address,bit/s,owners"),
        ("FUSCO_NCCL_RAILS", "lo,nowhere,0,1", "no IP address"),
        ("FUSCO_NCCL_RAILS", "lo,127.0.0.1,0,1;lo,::1,0,2", "IPv4 and IPv6 addresses are mixed"),
        ("FUSCO_NCCL_RAILS", ";".join(f"lo,127.0.0.{i + 1},0,1" for i in range(17)), "more than 16 rails"),
        ("FUSCO_NCCL_RAILS", "lo,198.51.100.7,0,1", "cannot listen on lo, 198.51.100.7: Cannot assign"),
        ("FUSCO_NCCL_WORKER", "7", "owns no rail .worker 7"),
        ("FUSCO_NCCL_POLICY", "fuselink-paper", "none of fuselink, spray, direct"),
        ("FUSCO_NCCL_LIMITS", "chunk_bytes=0", "a limit is not positive"),
        ("FUSCO_NCCL_LIMITS", "direct_depth=99", "more than 32 chunks"),
        ("FUSCO_NCCL_LIMITS", "speed=3", "the name of a field of Limits"),
        ("FUSCO_NCCL_BOARD", "/nowhere/board", "cannot open the board of rails /nowhere/board: No such file"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path, monkeypatch, name, value, text):
    for key, given in environment_of_plugin(
        RAILS, worker=1, policy="direct", limits=None, board=tmp_path / "b"
    ).items():
        monkeypatch.setenv(key, given)
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=text) as error:
        Plugin(str(plugin_path(flags=FLAGS)))
    assert error.value.code == SYSTEM_ERROR
    assert not (tmp_path / "b").exists()


def test_a_python_endpoint_sends_to_the_plugin(tmp_path):
    with started(tmp_path) as plugin, python_sender(tmp_path, plugin) as (channel, receiver):
        sizes = [0, 1, 65536, 65537, 1_500_000]
        buffers = [bytearray(size + 1) for size in sizes]
        receives = [receiver.irecv(each) for each in buffers]
        sends = [channel.isend(message(i, size)) for i, size in enumerate(sizes)]
        settle(receives, receiver)
        assert [each.wait() for each in sends] == [each.wait() for each in receives] == sizes
        for i, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
            assert buffer[:-1] == message(i, size).tobytes()


def test_rails_fail_under_load_and_come_back(tmp_path):
    rng, data = np.random.default_rng(3), message(0, 2_000_000)

    def cut(rail):
        if rail in channel._connections and len(channel.rails) > 1:
            channel.drop(channel._connections[rail], "cut", tells_peer=bool(rng.integers(2)))

    with started(tmp_path) as plugin, python_sender(tmp_path, plugin) as (channel, receiver):
        for repetition in range(10):
            buffers = [bytearray(len(data)) for _ in range(4)]
            receives = [receiver.irecv(each) for each in buffers]
            sends = [channel.isend(data) for _ in buffers]
            for rail in rng.integers(3, size=2):
                time.sleep(0.002)
                channel._host.loop.post(lambda rail=int(rail): cut(rail))
            settle([*receives, *sends], receiver)
            assert all(buffer == data.tobytes() for buffer in buffers), repetition
        end = time.monotonic() + 5.0
        while channel.rails != (0, 1, 2):
            assert time.monotonic() < end
            time.sleep(0.01)


KINDS = (DATA, GRANT, ACK, TOO_LARGE, RAIL_DOWN, BYE)


def forged(rng):
    """Bytes that no peer sends, or sends elsewhere: garbage, and records whose fields are changed."""
    if rng.random() < 0.2:
        return rng.bytes(int(rng.integers(1, 200)))
    small = [int(rng.integers(0, 40)) for _ in range(4)]
    huge = [int(rng.choice([0, 1, 65536, 2**31, 2**32 - 1])) for _ in range(4)]
    fields = [huge[i] if rng.random() < 0.3 else small[i] for i in range(4)]
    record = Record(fields[0], fields[1], fields[2], fields[3], small[0], int(rng.choice(KINDS)))
    return pack(record) + rng.bytes(min(fields[3], 70_000) if rng.random() < 0.7 else 0)


def test_records_that_are_forged_cost_their_connection_only(tmp_path):
    rng = np.random.default_rng(int(os.environ.get("PLUGIN_SEED", "5")))
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, receiver)]:
        for i in range(60):
            handle, listen = plugin.listen()
            address = address_of(handle)
            rail = int(rng.integers(3))
            this = Introduction(0, 3, 4096 if rng.random() < 0.5 else 65536, rng.bytes(16), rail, 1)
            handshake = Handshake(address.secret, this, is_server=False)
            with socket.create_connection(address.rails[rail], timeout=5.0) as client:
                for _ in range(2):
                    expected = client.recv(handshake.num_expected, socket.MSG_WAITALL)
                    client.sendall(handshake.receive(expected))
                comm = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
                receives = [comm.irecv(bytearray(int(rng.integers(0, 100_000)))) for _ in range(3)]
                comm.progress()
                with suppress(OSError):
                    for _ in range(20):
                        client.sendall(forged(rng))
                comm.progress()
            comm.close()
            assert all(each.done or each.handle.value for each in receives)
            plugin.call(plugin.table.closeListen, listen)
            requests = [sender.isend(message(i, 100_000)), receiver.irecv(buffer := bytearray(100_000))]
            settle(requests, sender, receiver)
            assert buffer == message(i, 100_000).tobytes()


def test_foreign_connections_are_refused(tmp_path):
    rng = np.random.default_rng(2)
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, receiver)]:
        handle, listen = plugin.listen()
        address = address_of(handle)
        silent = [socket.create_connection(address.rails[0]) for _ in range(20)]
        for i in range(30):
            with socket.create_connection(address.rails[i % 3]) as foreign:
                foreign.settimeout(5.0)
                handshake = Handshake(rng.bytes(32), Introduction(0, 3, 4096, rng.bytes(16), i % 3, 1), is_server=False)
                greeting = foreign.recv(24, socket.MSG_WAITALL)
                answer = handshake.receive(greeting) if i % 2 else rng.bytes(int(rng.integers(1, 300)))
                with suppress(OSError):  # it may be closed before all of that is sent
                    foreign.sendall(answer)
                    foreign.shutdown(socket.SHUT_WR)
                    assert foreign.recv(1) == b""  # nothing but the greeting is ever answered
        comm = ctypes.c_void_p()
        plugin.call(plugin.table.accept, listen, ctypes.byref(comm), None)
        assert comm.value is None
        plugin.call(plugin.table.closeListen, listen)
        requests = [sender.isend(message(1, 300_000)), receiver.irecv(buffer := bytearray(300_000))]
        settle(requests, sender, receiver)
        assert buffer == message(1, 300_000).tobytes()
        for each in silent:
            each.close()


def test_it_is_compiled_once_and_problems_are_told(tmp_path, monkeypatch):
    folder = CacheFolder(tmp_path, tmp_path)
    path = plugin_path(folder, ("-O0",))
    before = path.stat().st_mtime_ns
    assert plugin_path(folder, ("-O0",)).stat().st_mtime_ns == before
    with pytest.raises(CompileError, match=r"does not compile with .*no-such-flag"):
        plugin_path(folder, ("--no-such-flag",))
    with (
        pytest.warns(UserWarning, match="read-only"),
        pytest.raises(CompileError, match="read-only; set FUSCO_CACHE_DIR"),
    ):
        plugin_path(CacheFolder(tmp_path / "none", None, "read-only"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="none of cc, gcc, clang is installed"):
        plugin_path(folder)


def test_the_environment_that_nccl_needs(monkeypatch):
    rails = [Rail("eth0", "10.0.0.1", (0, 2), 10**10), Rail("eth1", "10.0.1.1", (1, 3))]
    chosen = nccl_plugin(rails, worker=2, board=Path("/dev/shm/b"), limits=Limits(batch=3))
    assert Path(chosen["NCCL_NET_PLUGIN"]).is_file()
    assert chosen["NCCL_NET"] == "fusco"
    assert chosen["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
    assert chosen["FUSCO_NCCL_RAILS"] == "eth0,10.0.0.1,10000000000,0+2;eth1,10.0.1.1,0,1+3"
    assert (chosen["FUSCO_NCCL_WORKER"], chosen["FUSCO_NCCL_BOARD"]) == ("2", "/dev/shm/b")
    assert "batch=3" in chosen["FUSCO_NCCL_LIMITS"]
    with pytest.raises(ValueError, match="policy must be one of fuselink, spray, direct, got 'fuselink-paper'"):
        nccl_plugin(rails, policy="fuselink-paper")
    monkeypatch.setattr("fusco.rails.nccl.nccl_version", lambda: (2, 21, 5))
    with pytest.raises(ValueError, match=r"the plugin is for NCCL 2.27 to 2.30, and this torch's is 2.21.5"):
        nccl_plugin(rails)
    assert why_not_nccl((2, 31, 0)).endswith("2.31.0")

"""The plugin for NCCL when peers are killed, rails fail, and connections are forged; peers may be Python endpoints."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from plugin_rig import LIMITS, RAILS, SOME, address_of, message, pairs, python_sender, settle, started
from wire_by_hand import (
    ACK,
    BYE,
    DATA,
    GRANT,
    RAIL_DOWN,
    RECORD_BYTES,
    TOO_LARGE,
    Record,
    connected_by_hand,
    pack,
    unpack,
)

from fusco.bench.rails.plugin import REMOTE_ERROR, PluginChannel, PluginError
from fusco.rails import Limits
from fusco.rails.binding import library_path
from fusco.rails.board import Board
from fusco.rails.nccl import nccl_plugin

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
    theirs = nccl_plugin(RAILS, worker=0, policy="fuselink", limits=LIMITS, board=tmp_path / "b")
    theirs["NCCL_NET_PLUGIN"] = str(library_path())
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
        with pytest.raises(PluginError, match=r"is unreachable, .*rail 2 \(lo, 127.0.0.3 to 127.0.0.3:") as error:
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


REFUSING = """
#include <errno.h>
#include <sys/epoll.h>
__attribute__((visibility("default"))) int num_to_pass, num_to_refuse; /* of calls that add a descriptor */
int __real_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event) {
  if (op == EPOLL_CTL_ADD && num_to_refuse) {
    static int number;
    if (num_to_pass ? !num_to_pass-- : ++number % 2) {
      num_to_refuse--;
      errno = ENOSPC;
      return -1;
    }
  }
  return __real_epoll_ctl(epoll, op, fd, event);
}
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    """Flags of a plugin to which the kernel refuses descriptors in epoll, and a function that sets which."""
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "refusing.c").write_text(REFUSING, encoding="ascii")
    flags = ["-O0", "-Wl,--wrap=epoll_ctl", str(tmp_path / "refusing.c")]
    library = ctypes.CDLL(str(library_path(flags=flags)))
    passed, refused = (ctypes.c_int.in_dll(library, name) for name in ("num_to_pass", "num_to_refuse"))

    def refuse(num_to_pass, num_to_refuse):
        passed.value, refused.value = num_to_pass, num_to_refuse

    yield flags, refuse, refused
    refused.value = 0


def test_descriptors_that_epoll_refuses_are_tried_again(tmp_path, refusing):
    flags, refuse, refused = refusing
    with started(tmp_path, flags=flags) as plugin:
        refuse(0, 12)  # every second one
        with pairs(plugin) as [(sender, receiver)]:
            sends = [sender.isend(message(i, 1 << 20)) for i in range(20)]
            buffers = [bytearray(1 << 20) for _ in sends]
            settle([*sends, *(receiver.irecv(each) for each in buffers)], sender, receiver, limit_s=5.0)
            assert buffers == [message(i, 1 << 20).tobytes() for i in range(20)]
            assert not refused.value


def test_a_plugin_that_cannot_wait_for_connections_says_so(tmp_path, refusing):
    flags, refuse, _ = refusing
    refuse(3, 1)  # after those of two threads and a listener
    with (
        pytest.raises(PluginError, match="cannot wait for connections on lo: No space left on device"),
        started(tmp_path, flags=flags),
    ):
        pass
    assert not (tmp_path / "b").exists()
    with started(tmp_path, flags=flags):
        pass


def test_a_process_that_ends_with_open_communicators(tmp_path):
    theirs = nccl_plugin(RAILS, worker=0, policy="fuselink", limits=LIMITS, board=tmp_path / "b")
    theirs["NCCL_NET_PLUGIN"] = str(library_path())
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


class Gate(list):
    """A log of the plugin that holds the thread which says something until it is opened."""

    def __init__(self):
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def append(self, line):
        super().append(line)
        self.reached.set()
        assert self.opened.wait(10.0)


@pytest.mark.parametrize("is_full", [False, True], ids=["writes later", "waits to write"])
def test_what_a_peer_acknowledged_before_it_reset_the_connection_was_delivered(tmp_path, is_full):
    """The plugin's thread is held while the peer acknowledges, leaves and resets, so it writes before it reads."""
    with started(tmp_path, limits=Limits(chunk_bytes=8 << 20, no_rail_s=1.0)) as plugin:
        handle, listen = plugin.listen()
        rail1, rail0 = (connected_by_hand(address_of(handle), b"n" * 16, rail) for rail in (1, 0))
        comm = plugin.accept(listen)
        sender, receiver = (PluginChannel(plugin, comm, is_sender=each) for each in (True, False))
        sends = [sender.isend(b"all"), *([sender.isend(SOME)] if is_full else [])]
        received = receiver.irecv(bytearray(1))
        sender.progress(), receiver.progress()
        rail1.sendall(b"".join(pack(Record(i, 8 << 20, kind=GRANT)) for i in range(len(sends))))
        while unpack(rail1.recv(RECORD_BYTES, socket.MSG_WAITALL)).kind != DATA:
            pass
        assert rail1.recv(3, socket.MSG_WAITALL) == b"all"
        if is_full:
            assert unpack(rail1.recv(RECORD_BYTES, socket.MSG_WAITALL))[:2] == (1, len(SOME))
        plugin.log = Gate()
        rail0.sendall(pack(Record(0, 2, kind=TOO_LARGE)))  # the plugin says so
        assert plugin.log.reached.wait(5.0)
        rail1.sendall(pack(Record(0, 3, kind=ACK)) + pack(Record(kind=BYE)))
        rail1.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rail1.close()
        rail0.close()
        plugin.log.opened.set()
        settle([*sends, received], sender, receiver, limit_s=5.0)
        assert sends[0].wait() == 3
        assert not is_full or sends[1].error.code == REMOTE_ERROR
        assert any("has closed its channel" in line for line in plugin.log)
        sender.close()
        plugin.call(plugin.table.closeListen, listen)


def test_peers_that_connect_while_the_plugin_ends_are_told(tmp_path):
    """Whenever that is: their connections are closed, whether or not a thread has taken them up."""
    for _ in range(40):
        with started(tmp_path) as plugin:
            address = address_of(plugin.listen()[0])
            client = connected_by_hand(address, bytes(16), 1)
        with client, suppress(ConnectionResetError):
            while client.recv(100):  # TimeoutError after 5 s
                pass


def test_a_message_of_more_bytes_than_there_are_costs_its_connection(tmp_path):
    with started(tmp_path) as plugin:
        handle, listen = plugin.listen()
        for kind in (TOO_LARGE, GRANT):
            with connected_by_hand(address_of(handle), bytes([kind]) * 16, 1) as client:
                receiver = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
                receiver.irecv(bytearray(1))
                receiver.progress()
                assert unpack(client.recv(RECORD_BYTES, socket.MSG_WAITALL)).kind == GRANT
                client.sendall(pack(Record(0, 2**64 - 1, kind=kind)))
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
                receiver.close()
        plugin.call(plugin.table.closeListen, listen)


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
    rng = np.random.default_rng(int(os.environ.get("ENGINE_SEED", "5")))
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, receiver)]:
        for i in range(60):
            handle, listen = plugin.listen()
            address = address_of(handle)
            rail, chunk_bytes = int(rng.integers(3)), 4096 if rng.random() < 0.5 else 65536
            with connected_by_hand(address, rng.bytes(16), rail, chunk_bytes) as client:
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

"""The plugin for NCCL, driven as NCCL drives it: messages of any size and number, between its own communicators."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time

import numpy as np
import pytest
from plugin_rig import message, pairs, settle, started
from plugin_versions import PluginV10, PropertiesV10, PropertiesV11, TableV10

from fusco.bench.rails.plugin import INVALID_USAGE, REMOTE_ERROR, Plugin, PluginChannel, PluginError, Table
from fusco.rails.board import BORROWED, COMPLETED, POSTED, RX_BYTES, TX_BYTES, Board


def offsets(structure):
    return {name: getattr(structure, name).offset for name, _ in structure._fields_}


def test_tables_have_the_layout_of_nccl():
    # NCCL 2.28's src/include/plugin/net/net_v10.h and net_v11.h, by a compiled sizeof and offsetof.
    sizes = [ctypes.sizeof(each) for each in (TableV10, PropertiesV10)]
    assert sizes == [160, 104]
    assert [ctypes.sizeof(each) for each in (Table, PropertiesV11)] == [176, 112]
    fields = {"pciPath": 8, "guid": 16, "ptrSupport": 24, "speed": 36, "latency": 44, "maxComms": 48, "vProps": 64}
    assert fields.items() <= offsets(PropertiesV10).items()
    assert offsets(PropertiesV11)["maxMultiRequestSize"] == 104
    assert offsets(PropertiesV10)["maxCollBytes"] == 96
    functions = {"init": 8, "connect": 40, "isend": 80, "irecv": 88, "test": 104, "closeListen": 128}
    for table in (TableV10, Table):
        assert functions.items() <= offsets(table).items()
    assert offsets(Table)["finalize"] == 160


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


@pytest.mark.parametrize("kind", [PluginV10, Plugin])
def test_a_version_sends_and_receives(tmp_path, kind):
    in_a_fork(sends_and_receives, tmp_path, kind)
    assert not (tmp_path / "b").exists()


def sends_and_receives(tmp_path, kind):
    sizes = [0, 1, 65536, 65537, 1_000_000, 3]
    with started(tmp_path, kind) as plugin:
        properties = (PropertiesV11 if kind is Plugin else PropertiesV10)()
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
        # The last request of the end that stays has no partner, however fast the others are.
        sends = [sender.isend(data) for _ in range(2 if closes == "sender" else 5)]
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
        assert any("has closed its channel" in line for line in plugin.log)
        stays.close()
        sent, got = ends[0][0].isend(data), ends[0][1].irecv(buffers[0])  # the other communicator goes on
        settle([sent, got], *ends[0])
        assert buffers[0] == data.tobytes()


def test_a_communicator_that_was_never_accepted(tmp_path):
    with started(tmp_path) as plugin:
        handle, listen = plugin.listen()
        sender = PluginChannel(plugin, plugin.connect(handle), is_sender=True)
        sent = sender.isend(b"not received")
        sender.progress()
        plugin.call(plugin.table.closeListen, listen)
        settle([sent], sender, limit_s=3.0)
        assert sent.error.code == REMOTE_ERROR
        sender.close()


def test_a_listen_that_is_gone(tmp_path):
    with started(tmp_path, timeout_s=0.5) as plugin:
        handle, listen = plugin.listen()
        plugin.call(plugin.table.closeListen, listen)
        with pytest.raises(PluginError, match=r"no rail to worker 1 was connected within 0.5 s: rail 0 \(lo") as error:
            plugin.connect(handle)
        assert error.value.code == REMOTE_ERROR
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1].to_bytes(2, "little")
        nothing = ctypes.create_string_buffer(handle.raw[:54] + port + handle.raw[56:], 128)
        with pytest.raises(PluginError, match=r"it listens no more.*Connection refused"):
            plugin.connect(nothing)
        with pytest.raises(PluginError, match="its handle is not one of theirs") as error:
            plugin.connect(ctypes.create_string_buffer(bytes(128), 128))
        assert error.value.code == INVALID_USAGE


def test_memory_of_a_gpu_is_refused(tmp_path):
    with started(tmp_path) as plugin, pairs(plugin) as [(sender, _)]:
        memory = ctypes.c_void_p()
        plugin.call(plugin.table.regMr, sender.comm, None, 8, 1, ctypes.byref(memory))
        plugin.call(plugin.table.deregMr, sender.comm, memory)
        with pytest.raises(PluginError, match="rails move host memory"):
            plugin.call(plugin.table.regMr, sender.comm, None, 8, 2, ctypes.byref(memory))

"""Messages between endpoints over loopback addresses, also while rails fail."""

import socket
import threading
import time

import numpy as np
import pytest
import torch
from rails_ends import RAILS, connected, cut, random_bytes, wait_for
from wire_by_hand import ACK, DATA, GRANT, Record, connected_by_hand, pack, read_record

from fusco.core.errors import PeerFailureError
from fusco.rails import Endpoint, Limits


@pytest.mark.parametrize("policy", ["fuselink", "fuselink-paper", "spray", "direct"])
def test_messages_in_both_directions(tmp_path, policy):
    sizes = [0, 1, 65536, 65537, 1_000_000, 3]
    with connected(tmp_path, policy) as ends:
        messages = [[random_bytes(size) for size in sizes] for _ in ends]
        buffers = [[bytearray(size + 5) for size in sizes] for _ in ends]
        receives = [[end.irecv(buffer) for buffer in each] for end, each in zip(ends, buffers, strict=True)]
        sends = [[end.isend(message) for message in each] for end, each in zip(ends, messages, strict=True)]
        for i in (0, 1):
            assert [each.wait() for each in receives[i]] == sizes
            assert [each.wait() for each in sends[i]] == sizes
            received = [bytes(buffer[:-5]) for buffer in buffers[i]]
            assert received == [message.tobytes() for message in messages[1 - i]]
        assert (ends[0].peer, ends[1].peer) == (1, 0)


def test_tensors_are_sent_from_and_received_into_their_memory(tmp_path):
    with connected(tmp_path) as (a, b):
        for tensor in (torch.randn(300, 77).bfloat16(), torch.arange(10), torch.tensor(2.5), torch.empty(0, 4)):
            out = torch.empty_like(tensor)
            received = b.irecv(out)
            a.isend(tensor).wait()
            assert received.wait() == tensor.nbytes
            assert torch.equal(out, tensor)


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        ("text", TypeError, "a buffer or a tensor is needed, got str"),
        (b"read-only", ValueError, "must be writable"),
        (np.zeros((4, 4))[:, 1], ValueError, "must be contiguous"),
        (torch.zeros(4, 4)[:, 1], ValueError, "a tensor must be contiguous, got strides"),
        (torch.zeros(2).to_sparse(), TypeError, "must be a dense tensor"),
        (torch.zeros(2, device="meta"), ValueError, "must be on the CPU, got one on meta"),
    ],
)
def test_buffers_that_cannot_be_received_into(tmp_path, buffer, error, text):
    with connected(tmp_path) as (a, _), pytest.raises(error, match=text):
        a.irecv(buffer)


def test_a_message_larger_than_its_receive(tmp_path):
    with connected(tmp_path) as (a, b):
        sends, receives = [a.isend(bytes(100)), a.isend(b"next")], [b.irecv(bytearray(99)), b.irecv(bytearray(4))]
        for each in (sends[0], receives[0]):
            with pytest.raises(ValueError, match="100"):
                each.wait()
        assert (sends[1].wait(), receives[1].wait()) == (4, 4)


def test_threads_may_post_at_the_same_time(tmp_path):
    with connected(tmp_path) as (a, b):
        sent, buffers = [], [bytearray(4) for _ in range(400)]
        receives = [b.irecv(buffer) for buffer in buffers]

        def send(base):
            sent.extend(a.isend((base + i).to_bytes(4, "little")) for i in range(100))

        threads = [threading.Thread(target=send, args=(1000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in (*sent, *receives):
            each.wait()
        numbers = [int.from_bytes(buffer, "little") for buffer in buffers]
        assert sorted(numbers) == sorted(1000 * k + i for k in range(4) for i in range(100))
        for k in range(4):
            assert [number for number in numbers if number // 1000 == k] == [1000 * k + i for i in range(100)]


def test_rails_fail_under_load_and_come_back(tmp_path):
    message, rng = random_bytes(4_000_000), np.random.default_rng(1)
    with connected(tmp_path) as ends:
        for repetition in range(12):
            buffers = [bytearray(len(message)) for _ in range(4)]
            receives = [ends[1].irecv(buffer) for buffer in buffers]
            sends = [ends[0].isend(message) for _ in buffers]
            for _ in range(2):
                time.sleep(0.002)
                end = ends[int(rng.integers(2))]
                if len(end.rails) > 1:
                    cut(end, end.rails[int(rng.integers(len(end.rails)))])
            for each in (*sends, *receives):
                assert each.wait() == len(message)
            assert all(buffer == message.tobytes() for buffer in buffers), repetition
        wait_for(lambda: all(end.rails == (0, 1, 2) for end in ends))


def test_all_rails_but_one_fail(tmp_path):
    message = random_bytes(3_000_000)
    with connected(tmp_path) as (a, b):
        buffer = bytearray(len(message))
        received, sent = b.irecv(buffer), a.isend(message)
        for rail in (0, 1):
            cut(a, rail)
        assert (sent.wait(), received.wait()) == (len(message), len(message))
        assert buffer == message.tobytes()


def test_a_late_chunk_arrives_over_another_rail(tmp_path):
    """The peer does not read the borrowed rail 1, as if its class never got a turn."""
    size, chunk_bytes = 3_000_000, 1 << 20
    message, arrived = random_bytes(size), bytearray(size)
    limits = Limits(chunk_bytes=chunk_bytes, hold_s=0.02, release_s=0.001)
    with Endpoint(worker=0, rails=RAILS[:2], board=tmp_path / "a", limits=limits) as endpoint:
        address = endpoint.listen()
        with (
            connected_by_hand(address, b"n" * 16, 0) as read,
            connected_by_hand(address, b"n" * 16, 1, num_received_bytes=4096) as stuck,
        ):
            channel = endpoint.accept()
            wait_for(lambda: channel.rails == (0, 1))
            sent, chunks = channel.isend(message), set()
            read.sendall(pack(Record(0, size, mask=0b11, epoch=1, kind=GRANT)))
            time.sleep(0.05)  # so that rail 1 has some
            while len(chunks) < 3:
                record = read_record(read)
                start = record.slot * chunk_bytes
                arrived[start : start + record.mask] = read.recv(record.mask, socket.MSG_WAITALL)
                chunks.add(record.slot)
                read.sendall(pack(Record(0, size, record.slot, 0b11, 1 + len(chunks), ACK)))
            assert sent.wait() == size
            assert arrived == message.tobytes()
            assert read_record(stuck).kind == DATA


def test_more_receives_than_a_sender_may_be_granted(tmp_path):
    with connected(tmp_path) as (a, b):
        buffers = [bytearray(4) for _ in range(1000)]
        receives = [b.irecv(buffer) for buffer in buffers]
        sends = [a.isend(i.to_bytes(4, "little")) for i in range(1000)]
        for each in (*sends, *receives):
            each.wait()
        assert [int.from_bytes(buffer, "little") for buffer in buffers] == list(range(1000))
        assert a.is_complete


def test_callbacks_are_called_in_order_and_with_the_error(tmp_path):
    with connected(tmp_path) as (a, b):
        order, last = [], []
        for i in range(100):
            b.irecv(bytearray(8), lambda error, i=i: order.append((i, error)))
            a.isend(bytes(8), last.append)
        wait_for(lambda: len(order) == len(last) == 100)
        assert order == [(i, None) for i in range(100)]
        assert last == [None] * 100
        failed = []
        b.irecv(bytearray(8), failed.append)
        a.close()
        wait_for(lambda: failed)
        assert isinstance(failed[0], PeerFailureError)

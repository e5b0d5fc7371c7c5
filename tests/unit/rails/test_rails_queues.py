"""Chunks of messages, without a network: any order, losses and repetitions deliver each message once, in order."""

import random

import pytest
from hypothesis import given, strategies as st

from fusco.rails.receive_queue import ReceiveQueue
from fusco.rails.request import Request
from fusco.rails.send_queue import SendQueue
from fusco.rails.wire import DATA, TOO_LARGE, Record, WireError, unpack

CHUNK = 8


def request(verb, seq):
    return Request(verb, seq, 0.0, lambda request, limit_s: TimeoutError(f"{request.verb} #{request.seq}"))


class Ends:
    """The two queues of a channel and what is under way between them."""

    def __init__(self, sizes, room=0):
        self.sends, self.receives = SendQueue(CHUNK), ReceiveQueue(CHUNK)
        self.messages = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
        self.buffers = [bytearray(b"\xee" * (size + room)) for size in sizes]
        self.sending = [request("isend", i) for i in range(len(sizes))]
        self.receiving = [request("irecv", i) for i in range(len(sizes))]
        for each, message in zip(self.sending, self.messages, strict=True):
            self.sends.add(memoryview(message), each)
        for each, buffer in zip(self.receiving, self.buffers, strict=True):
            self.receives.post(memoryview(buffer), each)

    def grant(self):
        for seq, size in list(self.receives.open_grants()):
            self.sends.grant(seq, size)

    def carry(self, name):
        """Bring a chunk to the receiver, in two parts."""
        header, payload = self.sends.frame(*name)
        record = unpack(header)
        for start, end in ((0, len(payload) // 2), (len(payload) // 2, len(payload))):
            if (target := self.receives.target(record)) is not None:
                target[start:end] = payload[start:end]
        self.receives.arrived(record)

    def pop_all(self):
        popped = []
        while (name := self.sends.pop()) is not None:
            popped.append(name)
        return popped


def test_nothing_is_sent_before_the_grant():
    ends = Ends([20])
    assert not ends.sends.has_chunk
    assert ends.sends.pop() is None
    ends.grant()
    assert ends.pop_all() == [(0, 0), (0, 1), (0, 2)]


def test_a_grant_may_come_before_the_message():
    sends, each = SendQueue(CHUNK), request("isend", 0)
    sends.grant(0, 100)
    assert not sends.has_chunk
    sends.add(memoryview(b"x" * 9), each)
    assert [sends.pop(), sends.pop(), sends.pop()] == [(0, 0), (0, 1), None]
    sends.grant(0, 100)
    assert sends.pop() is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_message_arrives_once_and_in_order(sizes, room, rng):
    ends = Ends(sizes, room)
    ends.grant()
    under_way, order = [], []
    for _ in range(10_000):
        if all(each.done for each in ends.sending):
            break
        event = rng.random()
        if event < 0.5 and (name := ends.sends.pop()) is not None:
            under_way.append(name)
        elif under_way and event < 0.9:
            name = under_way.pop(rng.randrange(len(under_way)))
            ends.carry(name)
            if rng.random() < 0.8:
                ends.sends.ack(*name)
            else:
                ends.sends.put_back([name])  # arrived, but its acknowledgement was lost
        elif under_way:  # a rail fails with everything that it has
            ends.sends.put_back(under_way)
            under_way.clear()
            ends.grant()
        order += [i for i, each in enumerate(ends.receiving) if each.done and i not in order]
    assert order == list(range(len(sizes)))
    assert [each.wait() for each in ends.receiving] == sizes
    assert [bytes(buffer[:size]) for buffer, size in zip(ends.buffers, sizes, strict=True)] == ends.messages
    assert all(buffer[size:] == b"\xee" * room for buffer, size in zip(ends.buffers, sizes, strict=True))
    assert ends.sends.is_empty
    assert ends.receives.is_empty


def test_a_chunk_that_comes_twice_does_not_touch_memory():
    ends = Ends([8])
    ends.grant()
    name = ends.sends.pop()
    record = unpack(ends.sends.frame(*name)[0])
    ends.carry(name)
    assert ends.receiving[0].done
    assert ends.receives.target(record) is None


def test_receives_finish_in_order():
    ends = Ends([8, 8])
    ends.grant()
    first, second = ends.pop_all()
    ends.carry(second)
    assert not ends.receiving[1].done
    ends.carry(first)
    assert [each.wait() for each in ends.receiving] == [8, 8]


def test_a_message_that_does_not_fit_fails_at_both_ends_and_the_next_arrives():
    ends = Ends([20, 5])
    ends.receives = ReceiveQueue(CHUNK)
    ends.buffers = [bytearray(10), bytearray(5)]
    for each, buffer in zip(ends.receiving, ends.buffers, strict=True):
        ends.receives.post(memoryview(buffer), each)
    ends.grant()
    for name in ends.pop_all():
        ends.carry(name)
        ends.sends.ack(*name)
    for each, text in ((ends.receiving[0], "buffer of 10 bytes, the message has 20"), (ends.sending[0], "20 bytes")):
        with pytest.raises(ValueError, match=text):
            each.wait()
    assert (ends.receiving[1].wait(), bytes(ends.buffers[1])) == (5, ends.messages[1])
    assert ends.buffers[0] == bytearray(10)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (Record(seq=1, size=8, slot=0, mask=8, kind=DATA), "only 1 were granted"),
        (Record(seq=0, size=30, slot=0, mask=8, kind=DATA), "has 30 bytes for a buffer of 20"),
        (Record(seq=0, size=20, slot=3, mask=4, kind=DATA), "chunk 3 of a message"),
        (Record(seq=0, size=20, slot=2, mask=8, kind=DATA), "claims 8 bytes instead of 4"),
        (Record(seq=0, size=20, slot=0, mask=4, kind=DATA), "claims 4 bytes instead of 8"),
        (Record(seq=0, size=20, slot=0, mask=0, kind=TOO_LARGE), "is said not to fit"),
    ],
)
def test_records_that_no_peer_sends(record, error):
    with pytest.raises(WireError, match=error):
        Ends([20]).receives.target(record)


def test_a_size_that_changes():
    receives = Ends([20]).receives
    receives.target(Record(seq=0, size=20, slot=0, mask=8, kind=DATA))
    with pytest.raises(WireError, match="chunk 1 of a message of 12 bytes, which has 20"):
        receives.target(Record(seq=0, size=12, slot=1, mask=4, kind=DATA))


def test_an_acknowledgement_of_no_chunk():
    ends = Ends([20])
    ends.grant()
    with pytest.raises(WireError, match="chunk 3 of message 0"):
        ends.sends.ack(0, 3)


def test_a_wait_has_a_limit():
    with pytest.raises(TimeoutError, match="isend #4"):
        request("isend", 4).wait(0.01)

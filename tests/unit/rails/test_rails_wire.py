"""Records, handshakes and addresses: what they are, and whatever else is refused."""

import struct

import pytest
from hypothesis import given, strategies as st

from fusco.rails.address import Address
from fusco.rails.handshake import EndpointInfo, Handshake, RefusedError
from fusco.rails.wire import ACK, BYE, DATA, MAGIC, RECORD_BYTES, Record, WireError, is_newer, pack, unpack

SECRET = bytes(range(32))
CLIENT = EndpointInfo(worker=3, num_rails=4, chunk_bytes=512, channel=b"c" * 16, rail=2, incarnation=7)
SERVER = EndpointInfo(worker=5, num_rails=2, chunk_bytes=1024)


def shake(client, server):
    """Exchange messages until both ends are done; return those that the client sent."""
    sent, answer = [], client.receive(server.greeting)
    while answer:
        sent.append(answer)
        client.receive(server.receive(answer))
        answer = b""
    return sent


def pair(secret=SECRET):
    return Handshake(SECRET, CLIENT, is_server=False), Handshake(secret, SERVER, is_server=True)


def test_a_record_by_hand():
    record = Record(seq=1, size=2, slot=3, mask=4, epoch=5, kind=ACK)
    assert pack(record) == struct.pack("<QQIIIHH", 1, 2, 3, 4, 5, ACK, MAGIC)
    assert len(pack(record)) == RECORD_BYTES == 32


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), *[st.integers(0, 2**32 - 1)] * 3, st.integers(DATA, BYE))
def test_records_survive(seq, size, slot, mask, epoch, kind):
    record = Record(seq, size, slot, mask, epoch, kind)
    assert unpack(pack(record)) == record


@given(st.binary(max_size=64))
def test_other_bytes_are_refused(data):
    if len(data) == RECORD_BYTES and data.endswith(struct.pack("<H", MAGIC)):
        data = data[:-1]
    with pytest.raises(WireError):
        unpack(data)


@pytest.mark.parametrize("kind", [0, BYE + 1, 65535])
def test_kinds_that_do_not_exist(kind):
    with pytest.raises(WireError, match="are not a record"):
        unpack(pack(Record(kind=kind)))


def test_epochs_wrap_around():
    assert is_newer(0, 2**32 - 1)
    assert not is_newer(2**32 - 1, 0)


def test_both_ends_learn_who_the_other_is():
    client, server = pair()
    shake(client, server)
    assert server.peer == CLIENT
    assert (client.peer.worker, client.peer.num_rails, client.peer.chunk_bytes) == (5, 2, 1024)


def test_a_foreign_secret_is_refused_by_both_ends():
    client, server = pair(secret=bytes(32))
    with pytest.raises(RefusedError, match="does not know the secret"):
        shake(client, server)
    assert client.peer is None
    assert server.peer is None


def test_a_recorded_handshake_is_refused():
    client, server = pair()
    (recorded,) = shake(client, server)
    with pytest.raises(RefusedError, match="does not know the secret"):
        pair()[1].receive(recorded)


def test_a_message_cannot_be_reflected():
    client, server = pair()
    answer = client.receive(server.greeting)
    with pytest.raises(RefusedError):
        client.receive((answer + bytes(100))[: client.num_expected])


@given(st.data())
def test_a_handshake_with_any_bit_changed_is_refused(data):
    client, server = pair()
    message = bytearray(client.receive(server.greeting))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RefusedError):
        server.receive(bytes(message))
    assert server.peer is None


def test_addresses_travel_as_bytes():
    address = Address(3, 512, (("10.0.0.1", 4000), ("fd00::1", 4001)), SECRET)
    assert Address.from_bytes(address.to_bytes()) == address
    assert SECRET.hex() not in repr(address)
    assert repr(SECRET) not in repr(address)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"rails": [["a"]], "worker": 1}', b"\xff\xfe"])
def test_bytes_that_are_no_address(data):
    with pytest.raises(ValueError, match="is not the address of an endpoint"):
        Address.from_bytes(data)

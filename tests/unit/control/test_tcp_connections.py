"""Peers of a TCP mesh connect with credentials; foreign connections and missing peers delay none of them."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import ExitStack, closing

import pytest
from meshes import LIMIT_S, SECRET, connecting_waits_by, exchange, mesh_of, transport_of

from fusco.control.hello import CHALLENGE_BYTES, NONCE_BYTES, TAG_BYTES, tag_of
from fusco.control.transport import Mesh
from fusco.core.errors import PeerFailureError, TransportError
from fusco.core.threads import in_thread
from store_gathers import on_ranks


def introduction(challenge, secret, rank):
    """What a rank answers to a challenge."""
    nonce, request = bytes(NONCE_BYTES), struct.pack("!q", rank)
    tag = tag_of(secret, b"client", challenge[-NONCE_BYTES:] + nonce, request)
    return nonce + struct.pack("!I", len(request)) + request + tag


def test_only_peers_connect():
    peers = {0: [2], 1: [3], 2: [0], 3: [1]}

    def talk(store_gather):
        mesh = mesh_of(store_gather, peers[store_gather.rank])
        try:
            return exchange(mesh, b"from %d" % store_gather.rank, peers[store_gather.rank])
        finally:
            mesh.transport.close()

    assert on_ranks(4, talk) == {rank: {peer: b"from %d" % peer for peer in of} for rank, of in peers.items()}


def test_without_peers_nothing_is_opened():
    def talk(store_gather):
        mesh = mesh_of(store_gather, [])
        mesh.begin({}, {})
        return mesh.is_done, mesh.poll()

    assert on_ranks(2, talk) == {rank: (True, []) for rank in range(2)}


def test_a_peer_that_does_not_come_is_named_and_nothing_is_left_open():
    before = threading.active_count()
    error = on_ranks(3, mesh_of, absent=(2,), timeout_s=0.3)[0]
    assert isinstance(error, PeerFailureError)
    assert error.peers == (2,)
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_peer_that_does_not_connect_is_not_waited_for_beyond_the_limit():
    before = threading.active_count()

    def come(store_gather):
        if store_gather.rank == 0:
            return mesh_of(store_gather)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            return store_gather.all_gather("TCP mesh", silent.getsockname()[:2])

    error = on_ranks(2, come, timeout_s=0.3)[0]
    assert isinstance(error, PeerFailureError)
    assert error.stall.phase == "connecting"
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_of_several_peers_the_one_that_does_not_connect_is_named():
    def come(store_gather):
        if store_gather.rank < 2:
            return mesh_of(store_gather)
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            socket.create_connection(
                tuple(store_gather.all_gather("TCP mesh", silent.getsockname()[:2])[1])
            ) as connection,
        ):
            challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            connection.sendall(introduction(challenge, SECRET.encode(), rank=2))
            time.sleep(1.0)  # and never connects to rank 0
            return None

    outcomes = on_ranks(3, come, timeout_s=0.5)
    assert isinstance(outcomes[0], PeerFailureError)
    assert outcomes[0].peers == (2,)
    assert (outcomes[0].stall.expected, outcomes[0].stall.seen) == ("2 connections", "1")
    outcomes[1].transport.close()


def test_a_peer_that_refuses_is_named_with_its_address():
    def come(store_gather):
        if store_gather.rank == 1:
            return mesh_of(store_gather)
        with socket.create_server(("127.0.0.1", 0)) as left:
            address = left.getsockname()[:2]
        return store_gather.all_gather("TCP mesh", address)

    error = on_ranks(2, come)[1]
    assert isinstance(error, OSError)
    assert str(error).startswith("rank 0 at 127.0.0.1:")
    assert "refused" in str(error)


def test_a_connection_made_after_the_wait_has_failed_is_closed(monkeypatch):
    connect, is_connecting, may_connect = socket.socket.connect, threading.Event(), threading.Event()

    class LateSocket(socket.socket):
        def connect(self, address):
            is_connecting.set()
            may_connect.wait(LIMIT_S)
            self.settimeout(LIMIT_S)  # it is accepted before it is closed
            connect(self, address)
            self.settimeout(0)

    monkeypatch.setattr("fusco.control.hello.socket.socket", LateSocket)

    def call(store_gather):
        def give_up(_, stall):
            is_connecting.wait(LIMIT_S)
            raise PeerFailureError(rank=1, peers=(0,), operation="", stall=stall(), reason="timed out", has_left=False)

        connecting_waits_by(store_gather, give_up)
        try:
            return transport_of(store_gather, [0])
        except PeerFailureError as error:
            may_connect.set()
            return error  # which references the frames

    def answer(store_gather):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LIMIT_S)
            store_gather.all_gather("TCP mesh", listener.getsockname()[:2])
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LIMIT_S / 4)
                while connection.recv(100):
                    pass
        return "closed"

    outcomes = on_ranks(2, lambda store_gather: call(store_gather) if store_gather.rank else answer(store_gather))
    assert isinstance(outcomes[1], PeerFailureError)
    assert outcomes[0] == "closed"


def test_no_thread_accepts_peers_after_the_wait_has_failed():
    before = threading.active_count()

    def come(store_gather):
        def give_up(*_):
            time.sleep(0.2)  # until the thread waits for connections
            raise TransportError("timed out")

        if store_gather.rank == 0:
            connecting_waits_by(store_gather, give_up)
            return transport_of(store_gather, [1])
        return store_gather.all_gather("TCP mesh", ("127.0.0.1", 9))

    assert isinstance(on_ranks(2, come)[0], TransportError)
    deadline = time.monotonic() + LIMIT_S / 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def exchange_after(meet, timeout_s=20.0):
    """What ``meet`` returns, which gets the address of rank 0 before rank 1, with which an exchange then succeeds."""

    def talk(store_gather):
        all_gather = store_gather.all_gather

        def all_gather_after_a_foreign_client(stage, value):
            if store_gather.rank == 0:
                met.append(meet(tuple(value)))
            return all_gather(stage, value)

        store_gather.all_gather = all_gather_after_a_foreign_client
        with closing(transport_of(store_gather)) as transport:
            return exchange(Mesh(transport), b"first", [1 - store_gather.rank])

    met = []
    assert on_ranks(2, talk, timeout_s=timeout_s) == {0: {1: b"first"}, 1: {0: b"first"}}
    (met_first,) = met
    return met_first


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 40, b"f" * 32 + bytes(7) + b"\x01"])
def test_invalid_credentials_are_rejected(sent):
    def meet(address):
        with socket.create_connection(address) as foreign:
            foreign.sendall(sent)

    exchange_after(meet)


@pytest.mark.parametrize(("secret", "rank"), [("another" * 5, 1), (SECRET, 0), (SECRET, 7)])
def test_clients_with_another_secret_or_rank_are_refused(secret, rank):
    def introduce(address):
        with socket.create_connection(address, timeout=LIMIT_S) as foreign:
            challenge = foreign.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            foreign.sendall(introduction(challenge, secret.encode(), rank))
            try:
                return foreign.recv(1)
            except ConnectionResetError:  # closed before all was read
                return b""

    def meet(address):
        refused = in_thread(lambda: introduce(address), "a foreign client")
        time.sleep(0.2)  # it is first
        return refused

    assert exchange_after(meet).result(LIMIT_S) == b""


def test_an_impostor_of_a_rank_is_not_connected_to():
    def come(store_gather):
        if store_gather.rank == 1:
            return mesh_of(store_gather)
        with socket.create_server(("127.0.0.1", 0)) as impostor:
            impostor.settimeout(LIMIT_S)
            store_gather.all_gather("TCP mesh", impostor.getsockname()[:2])
            with impostor.accept()[0] as connection:
                connection.sendall(b"FUSCOCT1" + bytes(NONCE_BYTES))
                connection.sendall(struct.pack("!I", 0) + bytes(TAG_BYTES))
                return b"" if SECRET.encode() not in connection.recv(1000) else "the secret"

    outcomes = on_ranks(2, come)
    assert outcomes[0] == b""
    assert "does not know the secret" in str(outcomes[1])


def test_the_number_of_unauthenticated_connections_is_bounded():
    num_unauthenticated, closed = 400, []
    with ExitStack() as stack:

        def talk(store_gather):
            all_gather = store_gather.all_gather

            def all_gather_after_foreign_clients(stage, value):
                if store_gather.rank == 0:
                    foreign_clients.extend(
                        stack.enter_context(socket.create_connection(tuple(value))) for _ in range(num_unauthenticated)
                    )
                return all_gather(stage, value)

            foreign_clients = []
            store_gather.all_gather = all_gather_after_foreign_clients
            if store_gather.rank == 1:
                store_gather.all_gather("TCP mesh", None)  # and never connects
                return
            may_end = threading.Timer(1.0, lambda: None)
            may_end.start()

            def wait_until(is_ready, stall):
                may_end.join()
                for foreign in foreign_clients:
                    foreign.setblocking(False)
                    try:
                        foreign.recv(CHALLENGE_BYTES)
                        closed.append(foreign.recv(1))
                    except BlockingIOError:
                        pass
                raise TransportError("enough")

            connecting_waits_by(store_gather, wait_until)
            with pytest.raises(TransportError, match="enough"):
                transport_of(store_gather, [1])
            return

        assert on_ranks(2, talk) == {0: None, 1: None}
    assert closed == [b""] * (num_unauthenticated - 256)


@pytest.mark.parametrize("sent", [b"", SECRET.encode(), SECRET.encode() + bytes(6)])
def test_an_idle_unauthenticated_connection_delays_no_peer(sent):
    with ExitStack() as foreign_clients:

        def meet(address):
            foreign_clients.enter_context(socket.create_connection(address)).sendall(sent)

        exchange_after(meet, timeout_s=3.0)


def test_a_connection_to_a_machine_that_is_off_closes_within_the_time_limit():
    def options(store_gather):
        with closing(transport_of(store_gather)) as transport:
            connections = list(transport._connections.values())
            assert [connection.fileno() for connection in connections] == list(transport.descriptors.values())
            assert connections[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            return store_gather.timeout_s, [connections[0].getsockopt(socket.IPPROTO_TCP, name) for name in names]

    timeout_s, (idle_s, interval_s, num_probes) = on_ranks(2, options)[0]
    assert 0 < idle_s + interval_s * num_probes <= max(timeout_s, 4)


def test_the_longest_limit_of_settings_is_one_of_connections():
    def talk(store_gather):
        with closing(transport_of(store_gather)) as transport:
            return exchange(Mesh(transport), b"here", [1 - store_gather.rank])

    assert on_ranks(2, talk, timeout_s=1e6) == {0: {1: b"here"}, 1: {0: b"here"}}


def test_two_threads_may_close_a_mesh_at_the_same_time():
    class Racing(dict):
        """The other thread takes the last connection between a look at it and its removal."""

        def __bool__(self):
            return True

    def close(store_gather):
        transport = transport_of(store_gather)
        transport._connections = Racing(transport._connections)
        transport.close()
        return dict(transport._connections)

    assert on_ranks(2, close) == {0: {}, 1: {}}

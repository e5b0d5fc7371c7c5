"""Messages between nodes: complete, in order, received when they are posted; errors name the peer that has gone."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import socket
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco.control.tcp_transport import TcpTransport
from fusco.core.errors import PeerFailureError
from fusco.cpu.rail_transport import RailTransport
from fusco.rails import Endpoint, Rail
from store_gathers import on_ranks

SECRET = "0123456789abcdef" * 2
LIMIT_S = 20.0
SIOCOUTQNSD = 0x894B  # of linux/sockios.h


def rails_of(num_workers):
    """Three rails of this host, of which all its workers own the first."""
    return [Rail("lo", f"127.0.0.{i + 1}", tuple(range(num_workers)) * (not i)) for i in range(3)]


@pytest.fixture(params=["TCP", "rails"])
def transport_of(request):
    """Makes a rank's transport, of either kind; all ranks have a board of this process together."""

    def make(store_gather):
        rank = store_gather.rank
        others = [other for other in range(store_gather.world_size) if other != rank]
        if request.param == "TCP":
            return TcpTransport(store_gather, others, "127.0.0.1", SECRET)
        return RailTransport(store_gather, others, rails_of, SECRET)

    return make


def finish(transport, tickets):
    deadline = time.monotonic() + LIMIT_S
    while not ((all(ticket.is_done for ticket in tickets) and not transport.unflushed_peers) or transport.failure):
        transport.poll()
        assert time.monotonic() < deadline


@pytest.mark.parametrize("num_elements", [1, 1000, 2_000_000])  # the last one more than any socket holds
def test_messages_of_all_peers_arrive_in_order(transport_of, num_elements):
    def talk(store_gather):
        transport, rank = transport_of(store_gather), store_gather.rank
        peers, arrived = [peer for peer in range(3) if peer != rank], []
        sent = {(peer, n): torch.full((num_elements,), 10 * rank + n) for peer in peers for n in range(3)}
        received = {key: torch.empty(num_elements, dtype=torch.int64) for key in sent}
        tickets = [transport.send(message, peer) for (peer, _), message in sent.items()]
        for (peer, n), memory in received.items():
            tickets.append(transport.receive(memory, peer, on_done=lambda key=(peer, n): arrived.append(key)))
        finish(transport, tickets)
        assert not transport.failure
        transport.close()
        in_order = all([n for src, n in arrived if src == peer] == [0, 1, 2] for peer in peers)
        return in_order and all((memory == 10 * peer + n).all() for (peer, n), memory in received.items())

    assert on_ranks(3, talk) == dict.fromkeys(range(3), True)


def test_ranks_of_a_host_are_workers_of_it_though_they_are_nodes_of_their_own():
    def number(store_gather):
        rank, lent = store_gather.rank, []
        others = [other for other in range(4) if other != rank]
        find_rails = lambda num_workers: lent.append(num_workers) or rails_of(num_workers)  # noqa: E731
        transport = RailTransport(store_gather, others, find_rails, SECRET)
        store_gather.all_gather("all are connected", None)
        transport.close()
        return lent

    assert on_ranks(4, number) == {rank: [4] for rank in range(4)}


def test_a_message_waits_until_its_receive_is_posted(transport_of):
    def talk(store_gather):
        transport, peer = transport_of(store_gather), 1 - store_gather.rank
        message = torch.arange(2_000_000) + store_gather.rank
        sending = transport.send(message, peer)
        for _ in range(100):
            transport.poll()
        was_done, memory = sending.is_done, torch.empty_like(message)
        store_gather.all_gather("both have looked", None)
        receiving = transport.receive(memory, peer)
        finish(transport, [sending, receiving])
        has_moved_more = all(transport.poll() for _ in range(100))
        transport.close()
        return was_done, has_moved_more, bool((memory == torch.arange(2_000_000) + peer).all())

    assert on_ranks(2, talk) == dict.fromkeys(range(2), (False, False, True))


def test_a_peer_that_has_gone_is_named(transport_of):
    def talk(store_gather):
        transport = transport_of(store_gather)
        if store_gather.rank == 0:
            ticket = transport.receive(torch.empty(5), 1)
            finish(transport, [ticket])
            assert not ticket.is_done
        transport.close()
        return transport.failure

    failures = on_ranks(2, talk)
    assert failures[0].startswith("the network failed to receive (rank 1): ")
    assert "closed" in failures[0]
    assert not failures[1]


def test_without_a_connection_the_error_has_the_cause_for_each_rail(monkeypatch):
    listen = Endpoint.listen

    def listen_elsewhere(endpoint):  # nothing listens there
        address = listen(endpoint)
        ports = [socket.create_server((host, 0)) for host, _ in address.rails]
        rails = tuple(each.getsockname() for each in ports)
        for each in ports:
            each.close()
        return dataclasses.replace(address, rails=rails)

    def connect(store_gather):
        return RailTransport(store_gather, [1 - store_gather.rank], rails_of, SECRET)

    monkeypatch.setattr(Endpoint, "listen", listen_elsewhere)
    errors = on_ranks(2, connect, timeout_s=1.0)
    assert isinstance(errors[0], PeerFailureError)
    assert errors[0].reason.endswith("; rank 1 connected no rail to this one")
    for i in range(3):
        rail = rf"rail {i} \(lo, 127.0.0.{i + 1} to 127.0.0.{i + 1}:\d+\): "
        assert re.search(rail + "Connection refused", errors[1].reason)


def test_a_peer_that_refuses_all_rails_is_named_at_once_with_the_cause_for_each(monkeypatch):
    """What listens at its address does not know the secret: it is no use to try again."""
    listen, told = Endpoint.listen, []

    def connect(store_gather):
        watcher = SimpleNamespace(find_fault=lambda stall, reason: told.append((store_gather.rank, stall, reason)))
        fail = store_gather.fail

        def fail_watched(stall, reason):
            with mock.patch.object(store_gather, "_watcher", watcher):
                fail(stall, reason)

        store_gather.fail = fail_watched
        begin = time.monotonic()
        try:
            RailTransport(store_gather, [1 - store_gather.rank], rails_of, SECRET)
        except PeerFailureError as error:
            return error, time.monotonic() - begin
        return None, 0.0

    monkeypatch.setattr(Endpoint, "listen", lambda endpoint: dataclasses.replace(listen(endpoint), secret=bytes(32)))
    (dialled, took_s), (accepting, waited_s) = (
        found for _, found in sorted(on_ranks(2, connect, timeout_s=4.0).items(), reverse=True)
    )
    assert took_s < 3.0 < 4.0 <= waited_s + 0.1, "here nothing tells rank 0, which waits for its limit"
    assert dialled.peers == (0,)
    assert accepting.peers == (1,)
    for i in range(3):
        rail = rf"rail {i} \(lo, 127.0.0.{i + 1} to 127.0.0.{i + 1}:\d+\): "
        assert re.search(rail + "the other end refused the handshake", dialled.reason)
    ((rank, stall, reason),) = told
    assert (rank, stall.on_ranks, reason) == (1, (0,), dialled.reason), "with a watchdog all ranks learn of it"


def test_without_peers_nothing_is_opened():
    def talk(store_gather):
        before = set(os.listdir("/proc/self/fd"))
        transport = TcpTransport(store_gather, [], "127.0.0.1", SECRET)
        opened = set(os.listdir("/proc/self/fd")) - before
        has_moved = transport.poll()
        transport.close()
        return has_moved, opened

    assert on_ranks(1, talk) == {0: (False, set())}


def test_the_kernel_takes_little_ahead_so_that_the_order_of_sending_holds():
    def talk(store_gather):
        peer = 1 - store_gather.rank
        transport = TcpTransport(store_gather, [peer], "127.0.0.1", SECRET)
        tickets = [transport.send(torch.zeros(64 << 10, dtype=torch.uint8), peer) for _ in range(256)]
        most_unsent = 0
        for _ in range(1000):
            most_unsent = max(most_unsent, num_unsent(transport._connections[peer]))
            transport.poll()
        store_gather.all_gather("both have looked", None)
        memory = torch.empty(64 << 10, dtype=torch.uint8)
        finish(transport, [*tickets, *(transport.receive(memory, peer) for _ in tickets)])
        transport.close()
        return most_unsent

    # Without the option it is the size of the send buffer: megabytes.
    unsent = on_ranks(2, talk)
    assert all(0 < most <= 512 << 10 for most in unsent.values()), unsent


def num_unsent(connection):
    """Return the bytes that the kernel has taken and not sent yet."""
    answer = bytearray(4)
    fcntl.ioctl(connection, SIOCOUTQNSD, answer)
    return int.from_bytes(answer, sys.byteorder)

"""Processes that join find the members through a store, whenever they ask, come or end."""

import os
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from fusco.control.agreement import Member
from fusco.control.joining import Invitation, Joining, JoinStore, invite, members_as_text
from fusco.control.status_server import StatusServer
from fusco.core.errors import TransportError

HOST, LIMIT_S = "127.0.0.1", 3.0


class Members:
    """The members of a communicator of four ranks, of which rank 0 is left."""

    def __init__(self, own):
        self.own, self.store = own, JoinStore(HashStore(), "it", LIMIT_S)

    def invite(self, free=(1, 2, 3)):
        def invitation_of(rank):
            members = members_as_text({0: self.own})
            return Invitation(rank=rank, num_ranks=4, secret="s", generation=7, members=members, placement={})

        return invite(self.store, list(free), invitation_of, self.own)

    def start_joining(self, rank=None, limit_s=LIMIT_S):
        """Join in a thread; the list gets the server, and the ``Joining`` in the end."""
        found = []

        def join():
            joining, server = Joining(self.store, rank, limit_s), None
            while server is None:
                server = joining.come(joining.ask())
            server.close()
            found.extend((server, joining))

        thread = threading.Thread(target=join)
        thread.start()
        return thread, found


@pytest.fixture
def members():
    server = StatusServer("s", HOST)
    yield Members(Member(server.address, os.getpid(), os.uname().nodename))
    server.close()


@pytest.fixture
def same_host(monkeypatch, members):
    monkeypatch.setattr("fusco.control.joining.host_identity", lambda: members.own.host)


def invite_until(members, num_joined):
    """Invite again and again, until so many have joined."""
    joined = {}
    deadline = time.monotonic() + LIMIT_S
    while len(joined) < num_joined and time.monotonic() < deadline:
        joined |= members.invite()
    return joined


@pytest.mark.usefixtures("same_host")
def test_a_process_joins_as_the_rank_that_it_wants(members):
    thread, found = members.start_joining(rank=2)
    joined = invite_until(members, 1)
    thread.join()
    server, joining = found
    assert joined == {2: Member(server.address, os.getpid(), members.own.host)}
    assert joining.members == {0: members.own, **joined}
    assert server.board.installed.number == 7


@pytest.mark.usefixtures("same_host")
def test_a_process_that_counts_before_it_asks_is_waited_for(members, monkeypatch):
    put = JoinStore.put

    def put_late(self, number, key, value):
        if key == "request":
            time.sleep(0.3)
        put(self, number, key, value)

    monkeypatch.setattr(JoinStore, "put", put_late)
    thread, _ = members.start_joining()
    while not members.store._store.add("asked", 0):
        time.sleep(0.001)
    assert set(members.invite()) == {1}
    thread.join()


@pytest.mark.usefixtures("same_host")
def test_a_process_that_comes_too_late_asks_again(members, monkeypatch):
    put, times = JoinStore.put, []

    def put_late(self, number, key, value):
        if key == "address":
            times.append(number)
            time.sleep(0.8 * LIMIT_S if len(times) == 1 else 0.0)
        put(self, number, key, value)

    monkeypatch.setattr(JoinStore, "put", put_late)
    thread, found = members.start_joining(limit_s=4 * LIMIT_S)
    while not members.store._store.add("asked", 0):
        time.sleep(0.001)
    began = time.monotonic()
    assert members.invite() == {}
    assert time.monotonic() - began < 0.8 * LIMIT_S
    assert set(invite_until(members, 1)) == {1}
    thread.join()
    assert times == [1, 2]
    assert set(found[1].members) == {0, 1}


@pytest.mark.usefixtures("same_host")
def test_a_process_that_has_ended_is_not_waited_for(members):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    number = members.store.new_number()
    members.store.put(number, "request", {"pid": ended.pid, "host": members.own.host, "rank": None})
    began = time.monotonic()
    assert members.invite() == {}
    assert time.monotonic() - began < 0.5


@pytest.mark.usefixtures("same_host")
def test_a_process_that_ends_while_it_joins_is_not_waited_for(members):
    ending = subprocess.Popen(["sleep", "0.3"])
    number = members.store.new_number()
    members.store.put(number, "request", {"pid": ending.pid, "host": members.own.host, "rank": None})
    threading.Thread(target=ending.wait).start()
    began = time.monotonic()
    assert members.invite() == {}
    assert time.monotonic() - began < 1.2


def test_nobody_calls_grow(members):
    with pytest.raises(TransportError, match=r"could not join within 0\.2 s: no rank has called grow"):
        Joining(members.store, None, 0.2).ask()


def test_no_rank_is_absent(members):
    def ask():
        with pytest.raises(ValueError, match="no rank of the group is absent"):
            Joining(members.store, None, LIMIT_S).ask()

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while thread.is_alive() and time.monotonic() < deadline:
        assert members.invite(free=()) == {}
    thread.join()

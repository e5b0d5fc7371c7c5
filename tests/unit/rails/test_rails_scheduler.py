"""The scheduler of a channel: batches, credits, borrowed chunks on the board, monitors; hypothesis plays hosts."""

import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings, strategies as st

from fusco.rails import Endpoint, Limits, Rail
from fusco.rails.binding import functions
from fusco.rails.board import BORROWED, COMPLETED, LAST_RX, LAST_TX, RX_CHUNKS, Board

NUM = 3
EVERY = (1 << NUM) - 1
RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(NUM)]
LIMITS = Limits(batch=4, refresh_s=1000.0, hold_s=100.0, release_s=1.0)
WAIT = -1


class Worker:
    """An endpoint's scheduler, for a channel whose rails are all connected."""

    def __init__(self, endpoint):
        self.handle, self.under_way = endpoint.scheduler(), []

    def choose(self):
        return functions()["scheduler_next"](self.handle)

    def complete(self, rail, num_bytes=0):
        functions()["scheduler_completed"](self.handle, rail, num_bytes)

    def credit(self, idle, epoch):
        functions()["scheduler_credit"](self.handle, idle, epoch)

    def idle_here(self):
        return functions()["scheduler_idle"](self.handle)


class Host:
    """Workers 0, 1 and 2 of a host, and its board."""

    def __init__(self, ending, folder, policy="fuselink", limits=LIMITS, num_workers=NUM):
        path = folder / "board"
        options = {"rails": RAILS, "board": path, "policy": policy, "limits": limits, "is_polled": True}
        self.workers = [Worker(ending.enter_context(Endpoint(worker=i, **options))) for i in range(num_workers)]
        self.board = Board(path)
        ending.callback(self.board.close)

    def set(self, row, rail, field, value):
        self.board.fields[1024 + (row * 16 + rail) * 8 + field] = value

    def uses(self, owner, *, uses, field=LAST_TX):
        """Have the owner of a rail use it, or not."""
        self.set(owner, owner, field, time.monotonic_ns() if uses else 0)

    def borrowed(self, rail):
        return sum(self.board.cell(each.row, rail)[BORROWED] for each in self.board.workers())


@pytest.fixture
def host_of(tmp_path):
    with ExitStack() as ending:
        yield lambda *arguments, **options: Host(ending, tmp_path, *arguments, **options)


def test_rails_are_taken_in_order_and_given_back(host_of):
    host = host_of()
    worker = host.workers[0]
    assert [worker.choose() for _ in range(9)] == [0, 0, 1, 2, 1, 2, 0, 0, WAIT]
    assert [host.borrowed(rail) for rail in range(NUM)] == [0, 2, 2]
    worker.complete(2, 100)
    assert worker.choose() == 2
    for rail in (0, 0, 0, 0, 1, 1, 2, 2):
        worker.complete(rail)
    assert [host.borrowed(rail) for rail in range(NUM)] == [0, 0, 0]


def test_idle_rails_are_looked_up_once_a_batch(host_of):
    host = host_of()
    worker = host.workers[0]
    assert [worker.choose() for _ in range(3)] == [0, 0, 1]
    host.uses(2, uses=True)
    assert worker.choose() == 2  # of the same batch
    worker.complete(2)
    assert [worker.choose() for _ in range(2)] == [1, 0]


def test_rails_that_are_busy_at_the_receiver_are_left_alone(host_of):
    first, second, _ = host_of().workers
    first.credit(0b001, 5)
    first.credit(0b111, 4)  # an older credit that another rail brought late
    assert [first.choose() for _ in range(5)] == [0, 0, 0, 0, WAIT]
    first.credit(0b101, 6)
    assert first.choose() == WAIT  # within the batch
    for idle, epoch in ((0, 2**31 - 1), (0b110, 2**32 - 2), (0b010, 0)):  # epochs wrap around
        second.credit(idle, epoch)
    assert [second.choose() for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("policy", "expected"), [("fuselink", 2), ("fuselink-paper", 4), ("spray", 8)])
def test_the_bound_on_borrowed_chunks(host_of, policy, expected):
    host = host_of(policy, num_workers=2)
    for worker in host.workers:
        while worker.choose() != WAIT:
            pass
    assert host.borrowed(2) == expected


def test_the_bound_holds_when_workers_race(host_of):
    host, over = host_of(limits=Limits(batch=1, hold_s=1e-9, direct_first=1, direct_depth=1)), []

    def borrow(worker):
        for _ in range(3000):
            rails = []
            while (rail := worker.choose()) != WAIT:
                rails.append(rail)
            if (borrowed := host.borrowed(rail)) > 2 * 3:  # each may be about to take one back
                over.append(borrowed)
            for rail in rails:
                worker.complete(rail)

    threads = [threading.Thread(target=borrow, args=(worker,)) for worker in host.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not over
    assert [host.borrowed(rail) for rail in range(NUM)] == [0] * NUM


def test_a_rail_is_busy_while_its_owner_is_active(tmp_path):
    slow = [Rail("lo", f"127.0.0.{i + 1}", (i,), 100_000_000 * (i == 2)) for i in range(NUM)]
    with ExitStack() as ending:
        options = {"rails": slow, "board": tmp_path / "board", "is_polled": True}
        endpoints = [ending.enter_context(Endpoint(worker=i, **options)) for i in range(NUM)]
        host = Host.__new__(Host)
        host.board, worker = Board(tmp_path / "board"), Worker(endpoints[0])
        ending.callback(host.board.close)
        assert worker.idle_here() == 0b111
        for row, rail in ((0, 0), (0, 1), (1, 1), (2, 2)):  # what worker 0 borrows of rail 1 is no owner's traffic
            host.set(row, rail, LAST_RX, time.monotonic_ns())
        assert worker.idle_here() == 0b001
        host.set(1, 1, LAST_RX, time.monotonic_ns() - 11_000_000)  # hold_s is 10 ms
        host.set(2, 2, LAST_RX, time.monotonic_ns() - 60_000_000)  # on this rail two chunks take 84 ms
        assert worker.idle_here() == 0b011
        host.set(2, 2, LAST_RX, time.monotonic_ns() - 85_000_000)
        assert worker.idle_here() == 0b111


def test_as_published_a_rail_is_busy_after_new_completions(host_of):
    host = host_of("fuselink-paper", limits=Limits(hold_s=0.2))
    worker = host.workers[0]
    host.set(1, 1, LAST_RX, time.monotonic_ns())
    assert worker.idle_here() == 0b111  # a chunk that is not complete goes unnoticed
    host.set(1, 1, RX_CHUNKS, 1)
    host.set(2, 2, COMPLETED, 1)
    assert worker.idle_here() == 0b111  # too early for the next poll
    time.sleep(0.2)
    assert worker.idle_here() == 0b101
    time.sleep(0.2)
    assert worker.idle_here() == 0b111
    assert [worker.choose() for _ in range(3)] == [0, 0, 1]  # rail 2 has completed a chunk


def test_a_worker_with_nothing_under_way_gives_its_rail_back_sooner(host_of):
    host = host_of(limits=Limits(hold_s=0.4, release_s=0.1))
    worker, owner = host.workers[:2]
    rails = [owner.choose(), owner.choose()]
    assert rails == [1, 1]
    owner.complete(1, 10)
    since = time.monotonic_ns() - host.board.cell(1, 1)[LAST_TX]
    assert since < 100_000_000
    owner.complete(1, 10)
    assert 300_000_000 <= time.monotonic_ns() - host.board.cell(1, 1)[LAST_TX] < 400_000_000
    assert 1 not in [worker.choose() for _ in range(3)]
    time.sleep(0.1)
    assert 1 in [host.workers[2].choose() for _ in range(4)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, NUM - 1), st.integers(0, 2), st.booleans()), max_size=60))
def test_laws_of_a_host(tmp_path_factory, steps):
    """Workers choose, complete and see rails become busy, in any order."""
    with ExitStack() as ending:
        host = Host(ending, tmp_path_factory.mktemp("host"), limits=Limits(batch=1, hold_s=100.0, release_s=100.0))
        used = dict.fromkeys(range(NUM), False)
        for who, action, uses in steps:
            worker = host.workers[who]
            if action == 0:
                used[who] = uses
            elif action == 1 and worker.under_way:
                worker.complete(worker.under_way.pop(0), 1)
            else:
                for owner, is_used in used.items():
                    host.uses(owner, uses=is_used)
                rail = worker.choose()
                if rail != WAIT:
                    worker.under_way.append(rail)
                    assert rail == who or not used[rail]
            for rail in range(NUM):
                borrowed = sum(each.under_way.count(rail) for i, each in enumerate(host.workers) if i != rail)
                assert borrowed == host.borrowed(rail) <= LIMITS.borrowed_per_rail

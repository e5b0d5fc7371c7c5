"""The scheduler of a channel: batches, credits, borrowed chunks on the board; hypothesis plays hosts of workers."""

import pytest
from hypothesis import given, settings, strategies as st

from fusco.rails.board import Board
from fusco.rails.board_row import BoardRow
from fusco.rails.limits import Limits
from fusco.rails.rail import Rail
from fusco.rails.schedule import POLICIES, WAIT
from fusco.rails.scheduler import Scheduler

NUM = 3
EVERY = (1 << NUM) - 1
RAILS = [Rail(f"eth{i}", f"10.0.0.{i + 1}", (i,)) for i in range(NUM)]
LIMITS = Limits(batch=4, refresh_s=1000.0)


class StubMonitor:
    def __init__(self):
        self.idle, self.num_queries = EVERY, 0

    def idle_to_send(self):
        self.num_queries += 1
        return self.idle

    idle_to_receive = idle_to_send


@pytest.fixture
def board(tmp_path):
    opened = Board(tmp_path / "board")
    yield opened
    opened.close()


def scheduler_of(board, worker, policy="fuselink", monitor=None, limits=LIMITS):
    row = BoardRow(board, worker, 1 << worker, RAILS)
    made = Scheduler(row, monitor or StubMonitor(), POLICIES[policy], limits, direct=1 << worker, num_rails=NUM)
    made.view.usable = EVERY
    return made, row


def test_rails_are_taken_in_order_and_given_back(board):
    scheduler, row = scheduler_of(board, 0)
    chosen = [scheduler.choose() for _ in range(9)]
    assert chosen == [0, 0, 1, 2, 1, 2, 0, 0, WAIT]
    assert [row.borrowed(rail) for rail in range(NUM)] == [0, 2, 2]
    scheduler.completed(2, 100)
    assert scheduler.choose() == 2
    for rail in (0, 0, 0, 0, 1, 1, 2, 2):
        scheduler.completed(rail, 0)
    assert [row.borrowed(rail) for rail in range(NUM)] == [0, 0, 0]
    assert scheduler.view.outstanding == [0, 0, 0]


def test_idle_rails_are_looked_up_once_a_batch(board):
    monitor = StubMonitor()
    scheduler, _ = scheduler_of(board, 0, monitor=monitor)
    for _ in range(4):
        scheduler.completed(scheduler.choose(), 0)
    assert monitor.num_queries == 1
    scheduler.choose()
    assert monitor.num_queries == 2


def test_rails_that_are_busy_at_the_receiver_are_left_alone(board):
    scheduler, _ = scheduler_of(board, 0)
    scheduler.credit(0b001, 5)
    scheduler.credit(0b111, 4)  # an older credit that another rail brought late
    assert [scheduler.choose() for _ in range(5)] == [0, 0, 0, 0, WAIT]
    scheduler.credit(0b101, 6)
    assert scheduler.choose() == WAIT  # within the batch
    ahead, _ = scheduler_of(board, 1)
    ahead.credit(0b110, 1)
    assert [ahead.choose() for _ in range(3)] == [1, 1, 2]


@pytest.mark.parametrize(("policy", "expected"), [("fuselink", 2), ("fuselink-paper", 4), ("spray", 8)])
def test_the_bound_on_borrowed_chunks(board, policy, expected):
    (first, row), (second, _) = scheduler_of(board, 0, policy), scheduler_of(board, 1, policy)
    for scheduler in (first, second):
        while scheduler.choose() != WAIT:
            pass
    assert row.borrowed(2) == expected


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, NUM - 1), st.integers(0, 2), st.integers(0, EVERY)), max_size=60))
def test_laws_of_a_host(tmp_path_factory, steps):
    """Workers choose, complete and see rails become busy, in any order."""
    board = Board(tmp_path_factory.mktemp("board") / "board")
    monitors = [StubMonitor() for _ in range(NUM)]
    limits = Limits(batch=1)
    workers = [scheduler_of(board, i, monitor=monitors[i], limits=limits) for i in range(NUM)]
    under_way = [[] for _ in range(NUM)]
    for worker, action, idle in steps:
        scheduler = workers[worker][0]
        if action == 0:
            monitors[worker].idle = idle
        elif action == 1 and under_way[worker]:
            scheduler.completed(under_way[worker].pop(0), 1)
        else:
            rail = scheduler.choose()
            if rail != WAIT:
                under_way[worker].append(rail)
                assert rail == worker or monitors[worker].idle >> rail & 1
        for rail in range(NUM):
            borrowed = sum(each.count(rail) for i, each in enumerate(under_way) if i != rail)
            assert borrowed == workers[0][1].borrowed(rail) <= limits.borrowed_per_rail
    for _, row in workers:
        row.close()
    board.close()

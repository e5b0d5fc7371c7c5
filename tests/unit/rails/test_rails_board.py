"""The board: rows, borrowed chunks, dead workers, and the monitors that read it."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from unittest import mock

import pytest
from plugin_rig import descriptors_left

from fusco.core.errors import SharedMemoryError
from fusco.rails import board as layout
from fusco.rails.board import Board, LockHeldError
from fusco.rails.board_row import BoardRow
from fusco.rails.monitor import ActivityMonitor, CompletionMonitor
from fusco.rails.rail import Rail
from fusco.rails.usage import UsageReader

RAILS = [Rail(f"eth{i}", f"10.0.0.{i + 1}", (i,), 2_000_000_000) for i in range(3)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "board"


@pytest.fixture
def board(path):
    opened = Board(path)
    yield opened
    opened.close()


def row_of(board, worker):
    return BoardRow(board, worker, 1 << worker, RAILS)


class Clock:
    def __init__(self):
        self.now = 10**12

    def __call__(self):
        return self.now


def test_workers_register_and_leave(board, path):
    rows = [row_of(board, worker) for worker in (0, 1)]
    assert [(each.worker, each.direct, each.pid) for each in board.workers()] == [
        (0, 0b01, os.getpid()),
        (1, 0b10, os.getpid()),
    ]
    assert board.rails() == [(f"eth{i}", 2_000_000_000) for i in range(3)]
    before = board.generation
    rows[0].close()
    assert [each.worker for each in board.workers()] == [1]
    assert board.generation != before
    assert row_of(board, 2).row == rows[0].row
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_counts_are_where_the_layout_says(board, path):
    rows = [row_of(board, worker) for worker in (0, 1)]
    rows[1].post(2)
    rows[1].complete(2, 5000)
    rows[1].received(0, 70)
    assert rows[1].take(2, 2)
    data = path.read_bytes()

    def field(rail, number):
        at = 8192 + (1 * 16 + rail) * 64 + 8 * number
        return int.from_bytes(data[at : at + 8], "little")

    assert data[:8] == b"FUSCORLS"
    assert [field(2, i) for i in (0, 1, 4, 7)] == [1, 1, 5000, 1]
    assert [field(0, i) for i in (5, 6)] == [70, 1]
    assert field(2, 2) > 0
    assert board.cell(1, 2)[layout.TX_BYTES] == 5000


def test_the_bound_is_shared_by_all_workers(board):
    rows = [row_of(board, worker) for worker in range(3)]
    assert [row.take(1, 2) for row in (rows[0], rows[2], rows[0])] == [True, True, False]
    assert rows[0].borrowed(1) == 2
    rows[2].give_back(1)
    assert rows[0].take(1, 2)
    assert rows[0].borrowed_by_this(1) == 2
    assert rows[2].take(1, None)  # without a bound


def test_the_bound_holds_when_workers_race(board):
    rows = [row_of(board, worker) for worker in range(3)]
    over = []

    def borrow(row):
        for _ in range(3000):
            if row.take(0, 2):
                held[row.row] = 1
                if sum(held.values()) > 2:
                    over.append(dict(held))
                held[row.row] = 0
                row.give_back(0)

    held = {row.row: 0 for row in rows}
    threads = [threading.Thread(target=borrow, args=(row,)) for row in rows]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not over
    assert rows[0].borrowed(0) == 0


def test_rows_of_dead_workers_are_reset(board, path):
    script = (
        "import sys, os; from pathlib import Path; from fusco.rails.board import Board;"
        "from fusco.rails.board_row import BoardRow; from fusco.rails.rail import Rail;"
        "row = BoardRow(Board(Path(sys.argv[1])), 1, 2, [Rail(f'eth{i}', f'10.0.0.{i + 1}', (i,)) for i in range(3)]);"
        "row.take(0, 2); row.take(0, 2); row.post(1); print('ready', flush=True); sys.stdin.read()"
    )
    row, pipe = row_of(board, 0), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, path], stdin=pipe, stdout=pipe) as child:
        assert child.stdout.readline() == b"ready\n"
        monitor = ActivityMonitor(board, row.row, [0] * 3, 10.0, 1 << 19)
        assert (monitor.idle_to_send(), row.take(0, 2)) == (0b101, False)
        board.reset_dead()
        assert len(board.workers()) == 2
        child.send_signal(signal.SIGKILL)
        child.wait()
    board.reset_dead()
    assert [each.worker for each in board.workers()] == [0]
    assert (monitor.idle_to_send(), row.take(0, 2)) == (0b111, True)


def test_a_worker_registers_where_later_workers_see_it(path, board):
    Board(path).close()  # the last user so far
    assert not path.exists()
    row, later = row_of(board, 1), Board(path)
    row.post(1)
    assert [(each.worker, later.cell(each.row, 1)[layout.POSTED]) for each in later.workers()] == [(1, 1)]
    row.close()
    later.close()


def test_a_reader_follows_a_board_that_its_last_worker_has_removed(path):
    with closing(UsageReader(path)) as reader:
        for num_bytes in (7000, 5000):
            with closing(Board(path)) as job, closing(row_of(job, 1)) as row:
                assert [(use.worker, use.sent_mb_per_s) for use in reader.read()] == [(1, 0)]
                row.post(1)
                row.complete(1, num_bytes)
                assert [use.sent_mb_per_s > 0 for use in reader.read()] == [True]
            assert not path.exists()
            assert reader.read() == []
    assert not path.exists()


def test_the_last_one_removes_the_file(path):
    first, second = Board(path), Board(path)
    row = row_of(first, 0)
    second.close()
    assert path.exists()
    row.close()
    first.close()
    first.close()
    assert not path.exists()


def test_files_that_are_no_board(path):
    path.write_bytes(b"something else")
    with pytest.raises(SharedMemoryError, match="is not a board of rails of version 1; remove it"):
        Board(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(SharedMemoryError, match="cannot open the board of rails"):
        Board(path)


@pytest.mark.parametrize("num_bytes", [1, layout._NUM_BYTES])
def test_a_board_whose_maker_was_killed_is_completed(path, num_bytes):
    path.write_bytes(bytes(num_bytes))
    board = Board(path)
    assert path.stat().st_size == layout._NUM_BYTES
    row = row_of(board, 0)
    other = Board(path)
    assert [each.worker for each in other.workers()] == [0]
    row.close()
    other.close()
    board.close()


def test_a_board_that_was_replaced_does_not_remove_its_successor(path):
    old = Board(path)
    path.unlink()  # as its last worker did
    board = Board(path)
    row = row_of(board, 0)
    old.close()
    assert path.exists()
    row.close()
    board.close()


def test_a_worker_that_has_no_descriptor_left_is_told_so(board):
    with (
        descriptors_left(0),
        pytest.raises(SharedMemoryError, match=r"cannot register on .*: Too many open files; .* \(ulimit -n\)"),
    ):
        row_of(board, 0)
    assert not board.workers()
    row_of(board, 0).close()


def test_a_board_that_another_process_keeps_locked(board, path):
    row, other = board.register(0, 1, []), Board(path)
    fcntl.flock(other._fd, fcntl.LOCK_EX)
    with mock.patch.object(layout, "_LOCK_S", 0.05):
        for change in (lambda: Board(path), lambda: row_of(board, 1), lambda: board.unregister(row)):
            with pytest.raises(LockHeldError, match=rf"has held the lock of the board of rails {path} for 0\.05 s"):
                change()
    board.reset_dead()  # waits for nothing
    fcntl.flock(other._fd, fcntl.LOCK_UN)
    board.unregister(row)
    other.close()


def test_a_full_board(board, monkeypatch):
    monkeypatch.setattr(layout, "MAX_WORKERS", 2)
    for worker in (0, 1):
        row_of(board, worker)
    with pytest.raises(SharedMemoryError, match="has 2 workers"):
        row_of(board, 2)


def test_a_rail_is_busy_while_its_owner_is_active(board):
    clock, rows = Clock(), [row_of(board, worker) for worker in range(3)]
    monitor = ActivityMonitor(board, rows[0].row, [0, 0, 100_000_000], 0.010, 1 << 19, clock)
    assert (monitor.idle_to_send(), monitor.idle_to_receive()) == (0b111, 0b111)
    for row, rail in ((rows[0], 0), (rows[0], 1), (rows[1], 1), (rows[2], 2)):
        row.announce(rail)  # rail 0 is this worker's, and what it borrows of rail 1 is no owner's traffic
    rows[1].receiving(1)
    clock.now = max(board.cell(row.row, i)[layout.LAST_TX] for i, row in enumerate(rows)) + 9_000_000
    assert (monitor.idle_to_send(), monitor.idle_to_receive()) == (0b001, 0b101)
    clock.now += 2_000_000
    assert monitor.idle_to_send() == 0b011  # rail 2 is slow: two chunks take 84 ms
    clock.now += 80_000_000
    assert monitor.idle_to_send() == 0b111


def test_a_rail_is_busy_after_new_completions(board):
    clock, rows = Clock(), [row_of(board, worker) for worker in range(2)]
    monitor = CompletionMonitor(board, rows[0].row, 3, 0.010, clock)
    rows[1].post(1)
    assert monitor.idle_to_send() == 0b111  # as published: a chunk that is not complete goes unnoticed
    rows[1].complete(1, 10)
    assert monitor.idle_to_send() == 0b111  # too early for the next poll
    clock.now += 10_000_000
    assert (monitor.idle_to_send(), monitor.idle_to_receive()) == (0b101, 0b111)
    clock.now += 10_000_000
    rows[1].received(1, 10)
    assert (monitor.idle_to_send(), monitor.idle_to_receive()) == (0b111, 0b101)


def test_a_worker_with_nothing_under_way_gives_its_rail_back_sooner(board):
    clock, row = Clock(), row_of(board, 0)
    owner = BoardRow(board, 1, 0b10, RAILS, rest_s=0.008)
    monitor = ActivityMonitor(board, row.row, [0] * 3, 0.010, 1 << 19, clock)

    def idle_after(milliseconds):
        clock.now = time.monotonic_ns() + int(1e6 * milliseconds)
        return [bool(idle & 0b10) for idle in (monitor.idle_to_send(), monitor.idle_to_receive())]

    owner.post(1)
    owner.post(1)
    owner.receiving(1)
    owner.complete(1, 10)
    assert (idle_after(1), idle_after(5), idle_after(12)) == ([False] * 2, [False] * 2, [True] * 2)
    owner.complete(1, 10)
    owner.receiving(1, rests=True)
    assert (idle_after(-1), idle_after(5)) == ([False] * 2, [True] * 2)

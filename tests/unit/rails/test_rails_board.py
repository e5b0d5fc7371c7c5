"""The board: rows, dead workers, files that are no board, and its readers."""

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from plugin_rig import descriptors_left

from fusco.core.errors import SharedMemoryError
from fusco.rails import board as layout
from fusco.rails.board import Board, UsageReader
from fusco.rails.rail import Rail

RAILS = [Rail(f"eth{i}", f"10.0.0.{i + 1}", (i,), 2_000_000_000) for i in range(3)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "board"


@pytest.fixture
def board(path):
    opened = Board(path)
    yield opened
    opened.close()


def registered(path, worker):
    board = Board(path)
    board.register(worker, 1 << worker, RAILS)
    return board


def test_workers_register_and_leave(board, path):
    workers = [registered(path, worker) for worker in (0, 1)]
    assert [(each.worker, each.direct, each.pid) for each in board.workers()] == [
        (0, 0b01, os.getpid()),
        (1, 0b10, os.getpid()),
    ]
    assert board.rails() == [(f"eth{i}", 2_000_000_000) for i in range(3)]
    before, row = board.generation, workers[0].row
    workers[0].close()
    assert [each.worker for each in board.workers()] == [1]
    assert board.generation != before
    later = registered(path, 2)
    assert later.row == row
    assert os.stat(path).st_mode & 0o777 == 0o600
    workers[1].close()
    later.close()


def test_numbers_are_where_the_layout_says(board, path):
    board.register(1, 0b10, RAILS)
    board.announce(2)
    data = path.read_bytes()
    assert data[:8] == b"FUSCORLS"
    assert data[64:68] == b"eth0"
    assert int.from_bytes(data[1088:1096], "little") == os.getpid()
    at = 8192 + 2 * 64 + 8 * layout.LAST_TX
    assert int.from_bytes(data[at : at + 8], "little") == board.cell(0, 2)[layout.LAST_TX] > 0


def test_rows_of_dead_workers_are_reset(board, path):
    script = (
        "import sys, os; from pathlib import Path; from fusco.rails.board import Board, NamedRail;"
        "board = Board(Path(sys.argv[1])); board.register(1, 2, [NamedRail('eth0', 0)]);"
        "board.announce(1); print('ready', flush=True); sys.stdin.read()"
    )
    board.register(0, 1, RAILS)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, path], stdin=pipe, stdout=pipe) as child:
        assert child.stdout.readline() == b"ready\n"
        board.reset_dead()
        assert len(board.workers()) == 2
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert board.cell(1, 1)[layout.LAST_TX]
    board.reset_dead()
    assert [each.worker for each in board.workers()] == [0]
    assert not any(board.cell(1, 1))


def test_a_worker_registers_where_later_workers_see_it(path, board):
    Board(path).close()  # the last user so far
    assert not path.exists()
    board.register(1, 0b10, RAILS)
    later = Board(path)
    board.announce(1)
    assert [(each.worker, later.cell(each.row, 1)[layout.LAST_TX] > 0) for each in later.workers()] == [(1, True)]
    later.close()


def test_a_reader_follows_a_board_that_its_last_worker_has_removed(path):
    with closing(UsageReader(path)) as reader:
        for num_bytes in (7000, 5000):
            with closing(registered(path, 1)) as job:
                assert [(use.worker, use.sent_mb_per_s) for use in reader.read()] == [(1, 0)]
                job.fields[1024 + 8 + layout.TX_BYTES] = num_bytes
                assert [use.sent_mb_per_s > 0 for use in reader.read()] == [True]
            assert not path.exists()
            assert reader.read() == []
    assert not path.exists()


def test_the_last_one_removes_the_file(path):
    first, second = registered(path, 0), Board(path)
    second.close()
    assert path.exists()
    first.close()
    first.close()
    assert not path.exists()


def test_of_a_pattern_the_first_file_of_this_user_is_taken(tmp_path):
    pattern = tmp_path / "name.*"
    with closing(Board(pattern)) as first:
        assert first.path == tmp_path / "name.0"
    (tmp_path / "name.0").symlink_to("/etc/passwd")  # as another user's file, it is not this user's regular file
    with closing(Board(pattern)) as second:
        assert second.path == tmp_path / "name.1"
        (tmp_path / "name.0").unlink()
        with closing(Board(pattern)) as third:
            assert third.path == second.path


def test_files_that_are_no_board(path):
    path.write_bytes(b"something else")
    with pytest.raises(SharedMemoryError, match="is not a board of rails of version 1; remove it"):
        Board(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(SharedMemoryError, match="cannot open the board of rails"):
        Board(path)


@pytest.mark.parametrize("num_bytes", [1, 8 * layout._NUM_FIELDS])
def test_a_board_whose_maker_was_killed_is_completed(path, num_bytes):
    path.write_bytes(bytes(num_bytes))
    board = registered(path, 0)
    assert path.stat().st_size == 8 * layout._NUM_FIELDS
    with closing(Board(path)) as other:
        assert [each.worker for each in other.workers()] == [0]
    board.close()


def test_a_board_that_was_replaced_does_not_remove_its_successor(path):
    old = Board(path)
    path.unlink()  # as its last worker did
    board = registered(path, 0)
    old.close()
    assert path.exists()
    board.close()


def test_a_worker_that_has_no_descriptor_left_is_told_so(board):
    with (
        descriptors_left(0),
        pytest.raises(SharedMemoryError, match=r"cannot register on .*: Too many open files; .* \(ulimit -n\)"),
    ):
        board.register(0, 1, RAILS)
    assert not board.workers()
    board.register(0, 1, RAILS)


def test_a_board_that_another_process_keeps_locked(path):
    held, waiting = registered(path, 0), Board(path, limit_s=0.05)
    fcntl.flock(held.fd, fcntl.LOCK_EX)
    text = rf"another process has held the lock of the board of rails {path} for 0\.05 s: fuser {path} shows"
    for change in (lambda: Board(path, limit_s=0.05), lambda: waiting.register(1, 2, RAILS)):
        with pytest.raises(SharedMemoryError, match=text):
            change()
    waiting.reset_dead()  # waits for nothing
    waiting.close()  # nor raises: a file that stays is for its next user
    fcntl.flock(held.fd, fcntl.LOCK_UN)
    held.close()
    assert not path.exists()


def test_a_full_board(board, path):
    workers = [registered(path, 0) for _ in range(layout.MAX_WORKERS)]
    with pytest.raises(SharedMemoryError, match="has 64 workers, the maximum"):
        board.register(2, 1, RAILS)
    for each in workers:
        each.close()

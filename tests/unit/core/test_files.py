"""Files that are complete or invisible, whatever happens while they are written."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.inputs.traffic import write_trace
from fusco.core.cache import CacheFolder
from fusco.core.files import written_beside
from fusco.core.timeline import Span, write_chrome_trace

_LIMIT = 4096


@contextmanager
def disk_of(num_bytes):
    """No file grows beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def keep(path, num_values):
    if problem := CacheFolder(path.parent, path.parent).keep(path.name, bytes(8 * num_values)):
        raise OSError(problem)


WRITERS = {
    "lines.jsonl": lambda path, num: write_json_lines([Span("track", "name", 0.0, 1.0)] * num, path),
    "spans.json": lambda path, num: write_chrome_trace(path, [[Span("track", "name", 0.0, 1.0)] * num]),
    "routing.npy": lambda path, num: write_trace(path, np.arange(num)[:, None, None]),
    "routing.npz": lambda path, num: write_trace(path, np.random.default_rng(0).integers(1 << 60, size=(num, 1, 1))),
    "kernel.nbi": keep,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, name):
    path, write = tmp_path / name, WRITERS[name]
    with disk_of(_LIMIT), pytest.raises(OSError):  # noqa: PT011  of the system
        write(path, _LIMIT)
    assert not list(tmp_path.iterdir())
    write(path, 4)
    before = path.read_bytes()
    assert before
    with disk_of(_LIMIT), pytest.raises(OSError):  # noqa: PT011
        write(path, _LIMIT)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == before


def test_a_process_that_is_killed_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("before")
    program = (
        "import os, pathlib, signal, sys; from fusco.core.files import written_beside\n"
        "with written_beside(pathlib.Path(sys.argv[1])) as beside:\n"
        "    beside.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "before"


def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "file.txt", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o600)
    link.symlink_to(path)
    with written_beside(link) as beside:
        beside.write_text("after")
        assert link.read_text() == "before"
    assert link.is_symlink()
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_no_file_of_its_own_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with written_beside(pipe) as place:
        assert place == pipe
    assert pipe.is_fifo()
    program = "import pathlib; from fusco.core.files import written_beside\nprint('first', flush=True)\n"
    program += "with written_beside(pathlib.Path('/dev/stdout')) as place:\n    place.open('a').write('second\\n')\n"
    with (tmp_path / "out").open("a") as out:
        subprocess.run([sys.executable, "-c", program + "print('third')"], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\nthird\n"

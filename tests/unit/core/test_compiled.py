"""Compiled functions: cached under a digest of all their sources, and usable without a writable folder."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fusco
from fusco.core import announcements
from fusco.core.announcements import SlowWork, is_first_to_say
from fusco.core.cache import CacheFolder, default_cache_dir, find_cache_folder, private_folder
from fusco.core.compiled import digest_of_sources

SOURCES = Path(fusco.__file__).parents[1]
OUTER = (
    "from fusco.core.compiled import compiled\nfrom pkg.inner import add\n"
    "@compiled()\ndef total(x):\n    return add(x)\n"
)
INNER = "from fusco.core.compiled import compiled\n@compiled()\ndef add(x):\n    return x + {}\n"
CALL = "from pkg.outer import total; print(total(1), sum(total.stats.cache_hits.values()))"


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with a parent of its own: this one may have said for all its children that it compiles."""
    variables = {**os.environ, "PYTHONPATH": f"{folder}:{SOURCES}", **environment}
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True)


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "inner.py").write_text(INNER.format(10))
    (folder / "outer.py").write_text(OUTER)
    return tmp_path


def test_an_edit_of_a_function_that_is_inlined_is_seen(package):
    cache = str(package / "cache")
    at_once = "from fusco.core.compiled import _compiling; _compiling()._left_s = 0; "
    first, again = (run(at_once + CALL, package, FUSCO_CACHE_DIR=cache) for _ in range(2))
    assert (first.stdout, first.stderr) == ("11 0\n", "fusco: compiling CPU kernels, once on this machine\n")
    assert (again.stdout, again.stderr) == ("11 1\n", ""), "it is kept"
    (package / "pkg" / "inner.py").write_text(INNER.format(20))
    assert run(CALL, package, FUSCO_CACHE_DIR=cache).stdout == "21 0\n"


@pytest.mark.parametrize("can_write_temporary_files", [True, False])
def test_without_a_cache_folder_it_works_and_one_warning_says_what_is_used(package, can_write_temporary_files):
    # Not by permissions, which do not stop the superuser.
    (package / "file").touch()
    temporary = package / "temporary"
    temporary.mkdir()
    if not can_write_temporary_files:
        (temporary / f"fusco-{os.geteuid()}").touch()
    done = run(CALL, package, FUSCO_CACHE_DIR=str(package / "file" / "cache"), TMPDIR=str(temporary))
    assert done.stdout == "11 0\n"
    assert done.stderr.count("compiled kernels cannot be kept in") == 1
    used = f"kept in {temporary}/fusco-" if can_write_temporary_files else "every process compiles them anew"
    assert used in done.stderr
    assert "Set FUSCO_CACHE_DIR to a folder that only you can write" in done.stderr


def test_a_function_with_a_truncated_file_is_compiled_again(package):
    cache = package / "cache"
    run(CALL, package, FUSCO_CACHE_DIR=str(cache))
    for path in cache.rglob("*.nb[ci]"):
        path.write_bytes(path.read_bytes()[:10])
    assert run(CALL, package, FUSCO_CACHE_DIR=str(cache)).stdout == "11 0\n"


def test_a_read_only_folder_is_used_without_a_warning(package):
    cache = str(package / "cache")
    run(CALL, package, FUSCO_CACHE_DIR=cache)
    read_only = (
        "from fusco.core import cache\ndef refuse(folder): raise OSError('read-only')\ncache._check_writable = refuse\n"
    )
    done = run(read_only + CALL, package, FUSCO_CACHE_DIR=cache)
    assert (done.stdout, done.stderr) == ("11 1\n", "")


class Planted:
    """Touches a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self):
        return Path.touch, (self._file,)


def test_code_that_another_user_planted_does_not_run(package):
    cache, executed = package / "cache", package / "executed"
    run(CALL, package, FUSCO_CACHE_DIR=str(cache))
    for path in cache.rglob("*.nbc"):
        path.write_bytes(pickle.dumps(Planted(executed)))
    cache.chmod(0o777)
    temporary = package / "temporary"
    temporary.mkdir()
    done = run(CALL, package, FUSCO_CACHE_DIR=str(cache), TMPDIR=str(temporary))
    assert done.stdout == "11 0\n"
    assert not executed.exists()
    assert f"({cache} belongs to user {os.geteuid()} with mode drwxrwxrwx: another user could" in done.stderr
    assert done.stderr.count("another user could") == 1
    again = run(CALL, package, FUSCO_CACHE_DIR=str(cache), TMPDIR=str(temporary))
    assert (again.stdout, again.stderr.count("another user could")) == ("11 1\n", 1), "kept in the private folder"


@pytest.mark.parametrize("part", ["", "cpu", "cpu/kernel.nbc", "mover.so"])
@pytest.mark.parametrize("problem", ["writable", "owned"])
def test_a_folder_is_refused_for_anything_in_it_that_others_own_or_may_write(part, problem, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    for name in ("cpu/kernel.nbc", "mover.so"):
        assert CacheFolder(folder, folder).keep(name, b"code") == ""
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert find_cache_folder() == CacheFolder(folder, folder)
    path, owner = folder / part, os.geteuid()
    if problem == "writable":
        path.chmod(path.stat().st_mode | 0o020)
    else:
        owner += 1
        stat = Path.stat

        def stat_of_another(self, **options):
            found = stat(self, **options)
            return os.stat_result((*found[:4], owner, *found[5:])) if self == path else found

        monkeypatch.setattr(Path, "stat", stat_of_another)
    with pytest.warns(UserWarning, match=f"{re.escape(str(path))} belongs to user {owner} with mode [-d]rw.*fusco-"):
        found = find_cache_folder()
    assert found.readable == (tmp_path / f"fusco-{os.geteuid()}",)


def test_what_is_kept_is_trusted_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    before = os.umask(0)
    try:
        folder = find_cache_folder()
        assert folder.keep("cpu/kernel.nbc", b"code") == ""
    finally:
        os.umask(before)
    assert find_cache_folder() == folder
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "deep").rglob("*")] == [0o755, 0o755, 0o644]


def test_no_import_touches_the_cache(tmp_path):
    modules = "import fusco.api.communicator, fusco.schedule, fusco.control.flags, fusco.planner.balancer"
    run(modules, tmp_path, FUSCO_CACHE_DIR=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_where_kernels_are_kept(tmp_path, monkeypatch):
    environment = {"XDG_CACHE_HOME": "/xdg", "NUMBA_CACHE_DIR": "/numba", "FUSCO_CACHE_DIR": "/fusco"}
    assert default_cache_dir(environment) == default_cache_dir(environment, is_for_cpu=True) == Path("/fusco")
    del environment["FUSCO_CACHE_DIR"]
    assert default_cache_dir(environment) == Path("/xdg/fusco")
    assert default_cache_dir(environment, is_for_cpu=True) == Path("/numba/fusco")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir({}) == tmp_path / ".cache" / "fusco"
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match=r"the home directory .*nowhere does not exist"):
        default_cache_dir({})
    assert not (tmp_path / "nowhere").exists()


def test_a_private_folder_is_used_without_a_home_directory(tmp_path, monkeypatch):
    for name in ("FUSCO_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = find_cache_folder()
    assert (found.wanted, found.used) == (None, tmp_path / f"fusco-{os.geteuid()}")
    assert "nowhere does not exist" in found.describe()


def test_a_private_folder_belongs_to_this_user_only(tmp_path, monkeypatch):
    folder = private_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path) == folder
    folder.chmod(0o755)
    with pytest.raises(OSError, match="not a folder that only this user can open"):
        private_folder(tmp_path)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a folder that only this user can open"):
        private_folder(tmp_path)
    folder.unlink()
    folder.mkdir(mode=0o700)
    another = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: another)
    folder.rename(tmp_path / f"fusco-{os.geteuid()}")
    with pytest.raises(OSError, match="not a folder that only this user can open"):
        private_folder(tmp_path)


def test_a_digest_follows_imports(tmp_path):
    package = tmp_path / "pkg"
    (package / "deep").mkdir(parents=True)
    (package / "a.py").write_text("import math\nfrom pkg.deep import b\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "b.py").write_text("from pkg import a\nimport pkg.c\n")
    (package / "c.py").write_text("X = 1\n")
    (package / "unrelated.py").write_text("X = 1\n")

    def digest():
        digest_of_sources.cache_clear()
        return digest_of_sources(package / "a.py", package)

    first = digest()
    (package / "unrelated.py").write_text("X = 2\n")
    assert digest() == first
    (package / "c.py").write_text("X = 2\n")
    assert digest() != first


SAY = """
import sys, time
from fusco.core.announcements import announce
announce("compiling " + sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


def test_one_of_several_processes_of_a_parent_announces():
    text = str(os.getpid())

    def start():
        command, pipe = [sys.executable, "-c", SAY, text], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        process.stdout.readline()  # after the announcement
        return process

    processes = [start() for _ in range(3)]
    errors = [process.communicate()[1] for process in processes]
    assert errors == [f"fusco: compiling {text}\n", "", ""]
    late = start()
    assert late.communicate()[1] == f"fusco: compiling {text}\n", "the claim ends with its process"


def test_children_do_not_repeat_what_their_parent_announced():
    text = f"said {os.getpid()}"
    assert is_first_to_say(text)
    assert not is_first_to_say(text)
    code = f"from fusco.core.announcements import announce; announce({text!r})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr == b""


def test_every_process_announces_where_sockets_are_forbidden(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(announcements.socket, "socket", refuse)
    assert is_first_to_say(f"alone {os.getpid()}")
    assert not is_first_to_say(f"alone {os.getpid()}"), "but once"


def test_slow_work_is_announced_and_quick_work_is_not(monkeypatch):
    said, made = [], []

    class FakeTimer:
        def __init__(self, seconds, function):
            self.seconds, self.function, self.is_cancelled, self.daemon = seconds, function, False, False
            made.append(self)

        def start(self):
            assert self.daemon

        def cancel(self):
            self.is_cancelled = True

    monkeypatch.setattr(announcements, "announce", said.append)
    monkeypatch.setattr(announcements.threading, "Timer", FakeTimer)
    now = iter([0.0, 0.4, 10.0, 10.3, 20.0])
    monkeypatch.setattr(announcements.time, "monotonic", lambda: next(now))
    work = SlowWork(lambda: "slow")
    work.begin()
    work.begin()  # a part of a part
    work.end()
    work.end()
    work.begin()
    work.end()
    work.begin()
    assert [round(timer.seconds, 3) for timer in made] == [1.0, 0.6, 0.3], "parts add up"
    assert [timer.is_cancelled for timer in made] == [True, True, False]
    made[-1].function()
    assert said == ["slow"]


def test_a_folder_says_where_kernels_are():
    assert CacheFolder(Path("/a"), Path("/a")).describe() == "kept in /a"
    assert CacheFolder(Path("/a"), Path("/b"), "full").describe() == (
        "cannot be kept in /a (full); kept in /b until that is cleared"
    )
    assert CacheFolder(None, None, "no home").readable == ()

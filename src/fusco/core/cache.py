"""Folders on disk for compiled kernels, and the fallback where they cannot be written."""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusco.core.announcements import is_first_to_say
from fusco.core.files import written_beside

CACHE_DIR_VARIABLE = "FUSCO_CACHE_DIR"
NUMBA_CACHE_DIR_VARIABLE = "NUMBA_CACHE_DIR"  # of numba; used for CPU kernels unless FUSCO_CACHE_DIR is set


@dataclass(frozen=True)
class CacheFolder:
    """A folder for compiled kernels."""

    # folder of the environment; searched first even if it cannot be written. ``None`` if there is none, or if another
    # user could have put code into it.
    wanted: Path | None
    used: Path | None  # folder that kernels are written to: ``wanted``, a private temporary folder, or ``None``
    problem: str = ""  # why the folder of the environment is not used; empty if it is

    @property
    def readable(self) -> tuple[Path, ...]:
        """Folders to search for a kernel, in this order."""
        return tuple(dict.fromkeys(folder for folder in (self.wanted, self.used) if folder is not None))

    def find(self, file: str) -> Path | None:
        """Return a file that has been kept, ``None`` if there is none."""
        return next((path for path in (folder / file for folder in self.readable) if path.is_file()), None)

    def keep(self, file: str, content: bytes) -> str:
        """Write a file, of which no process sees a part; return why it could not be written, empty if it is."""
        if self.used is None:
            return self.problem
        path = self.used / file
        try:
            _make_folder(path.parent)
            with written_beside(path) as beside:
                beside.write_bytes(content)
                beside.chmod(0o644)  # other users of the folder may read it
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def describe(self) -> str:
        """Return where kernels are kept, and why not in ``wanted``."""
        if not self.problem:
            return f"kept in {self.used}"
        kept = f"kept in {self.used} until that is cleared" if self.used else "every process compiles them anew"
        return f"cannot be kept in {self.wanted or 'the cache folder'} ({self.problem}); {kept}"

    def warn(self) -> None:
        """Warn once, in one of several related processes, if kernels cannot be kept in ``wanted``."""
        text = f"compiled kernels {self.describe()}. Set {CACHE_DIR_VARIABLE} to a folder that only you can write"
        if self.problem and is_first_to_say(text):
            warnings.warn(text, stacklevel=2)


def default_cache_dir(environment: Mapping[str, str] | None = None, *, is_for_cpu: bool = False) -> Path:
    """Return ``$FUSCO_CACHE_DIR``, ``$NUMBA_CACHE_DIR/fusco`` (CPU kernels only), or ``fusco`` in the user's cache.

    Raises ``OSError`` if the user has no home directory.
    """
    environment = os.environ if environment is None else environment
    if chosen := environment.get(CACHE_DIR_VARIABLE):
        return Path(chosen)
    if is_for_cpu and (of_numba := environment.get(NUMBA_CACHE_DIR_VARIABLE)):
        return Path(of_numba) / "fusco"
    if of_user := environment.get("XDG_CACHE_HOME"):
        return Path(of_user) / "fusco"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise OSError("this user has no home directory") from error
    if not home.is_dir():  # the superuser could make it, but a cache is no reason to
        raise OSError(f"the home directory {home} does not exist")
    return home / ".cache" / "fusco"


def find_cache_folder(*, is_for_cpu: bool = False) -> CacheFolder:
    """Return the folder of the environment if it can be written, else a private temporary one.

    If another user could have put code into the folder of the environment, it is not even read, and that warns.
    """
    wanted: Path | None = None
    trusted: Path | None = None
    try:
        wanted = default_cache_dir(is_for_cpu=is_for_cpu)
        _check_trusted(wanted)
        trusted = wanted
        _check_writable(wanted)
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        return CacheFolder(wanted, wanted)
    used: Path | None = None
    try:
        used = private_folder(Path(tempfile.gettempdir()))
        _check_writable(used)
    except OSError as error:
        used, problem = None, f"{problem}; nor in a temporary folder: {error.strerror or error}"
    folder = CacheFolder(trusted, used, problem)
    if trusted != wanted:
        folder.warn()
    return folder


def private_folder(parent: Path) -> Path:
    """Return a folder in ``parent`` that only this user can open, the same in every process; make it if missing.

    Raises ``OSError`` if it cannot be made or belongs to another user: code loaded from it is executed.
    """
    folder = parent / f"fusco-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not is_private:
        raise OSError(f"{folder} is not a folder that only this user can open")
    return folder


def _check_trusted(folder: Path) -> None:
    """Raise ``OSError`` if another user, but not root, owns or may write a folder or anything in it: it is executed."""
    found = (Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *found):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):  # no folder yet, or the temporary file of another process
            continue
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise OSError(
                f"{path} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}: another user could "
                f"put code there"
            )


def _make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that no other user may write, whatever the umask."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def _check_writable(folder: Path) -> None:
    _make_folder(folder)
    tempfile.TemporaryFile(dir=folder).close()

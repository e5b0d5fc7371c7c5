"""Files that are complete or invisible, and names of the boards in shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

_DIRECTORY = Path("/dev/shm")  # noqa: S108  the POSIX shared-memory file system of Linux


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a new file in the folder of ``path``, with its suffix, that replaces ``path`` at the end of the block.

    If the block raises, or its process dies, ``path`` stays as it was. The target of a link is replaced, not the link.
    In a folder that cannot be written, and for pipes, devices and ``/dev/stdout``, ``path`` itself is yielded.
    """
    is_regular = path.is_file() or not path.exists()
    is_of_process = path.is_absolute() and path.is_symlink() and path.parts[1] in {"dev", "proc"}
    if not is_regular or is_of_process or not os.access(path.resolve().parent, os.W_OK):
        yield path
        return
    path = path.resolve()
    beside = path.with_name(f".{path.stem}.{uuid4().hex}{path.suffix}")
    try:
        yield beside
        with suppress(FileNotFoundError):
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def board_pattern(kind: str, namespace: int) -> Path:
    """Return the pattern of this user's board of one kind (``rails``, ``links``), in the namespace of an inode.

    Other users may make files of these names, so the board is the first of them that is this user's.
    """
    return _DIRECTORY / f"fusco-{kind}-v1-{os.getuid()}-{namespace}.*"


def links_board() -> Path:
    """Return the board of PCIe links: one for each user and pid namespace, since it names workers by pid."""
    return board_pattern("links", os.stat("/proc/self/ns/pid").st_ino)


def remove_boards(kind: str, namespace: int) -> None:
    """Remove this user's boards of a namespace of which all processes have ended."""
    for path in _DIRECTORY.glob(board_pattern(kind, namespace).name):
        if path.lstat().st_uid == os.geteuid():
            path.unlink(missing_ok=True)

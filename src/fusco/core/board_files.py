"""Names of the boards: files in shared memory by which workers of a host see each other's use of NICs and links."""

from __future__ import annotations

import os
from pathlib import Path

_DIRECTORY = Path("/dev/shm")  # noqa: S108  the POSIX shared-memory file system of Linux


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

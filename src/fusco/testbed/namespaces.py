"""Namespaces of Linux without names: made, held by descriptors, and entered by processes."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

NEW_USER, NEW_NETWORK, NEW_NAMES = 0x10000000, 0x40000000, 0x04000000  # CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWUTS
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE


def unshare(kinds: int) -> None:
    """Move this process (or thread) to new namespaces; ``OSError`` if the system forbids it."""
    _call("unshare", kinds)


def become_root() -> None:
    """Move this process to a new user namespace, in which it is root; ``OSError`` if the system forbids it."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")


def set_host_name(name: str) -> None:
    """Set the host name of this process's namespace."""
    _call("sethostname", name.encode(), len(name))


@dataclass(frozen=True)
class Namespaces:
    """Namespaces of a rank: paths of the descriptors that hold them, valid as long as their testbed.

    Attributes:
        network: interfaces and routes.
        names: host name.
        user: user namespace of a testbed without root; empty with root.
    """

    network: str
    names: str
    user: str = ""

    def enter(self) -> None:
        """Move this process there, before it has threads and before it imports torch.

        Raises ``OSError`` if the testbed is closed, or, without root, if this process has several threads.
        """
        kinds = ((self.user, NEW_USER), (self.network, NEW_NETWORK), (self.names, NEW_NAMES))
        for path, kind in kinds:
            if path:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _call("setns", descriptor, kind)
                except OSError as error:
                    if kind == NEW_USER and error.errno == errno.EINVAL:
                        why = "a process with several threads cannot enter a testbed that was made without root"
                        raise OSError(errno.EINVAL, why) from error
                    raise
                finally:
                    os.close(descriptor)
        # A change of user hides /proc/PID from other processes of this user, which open shared memory through it.
        _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)
        # The testbed ends the processes in its namespaces when it closes; this one must not enter after that.
        os.stat(self.network)


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")

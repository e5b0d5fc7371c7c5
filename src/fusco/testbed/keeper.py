"""``python -m fusco.testbed.keeper LAYOUT``: the process that makes a testbed's namespaces and holds them.

It reads requests from stdin and answers on stdout, one JSON line each. When stdin ends, however the process at its
other end has ended, it kills all processes in the namespaces and exits; with it go the descriptors, and so the
namespaces, which have no name that could be left behind. Boards of rails have one, so it removes those.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from fusco.core.files import remove_boards
from fusco.testbed.layout import Layout
from fusco.testbed.namespaces import NEW_NAMES, NEW_NETWORK, become_root, set_host_name, unshare
from fusco.testbed.network import Switch

_SECONDS_BETWEEN_SCANS, _MAX_SCANS = 0.02, 250  # for processes that are still there
_REMEDY = (
    "a testbed needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), or user namespaces, which this system forbids; see "
    "sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
)


class Keeper:
    """Holds the namespaces of a testbed; its switch answers the requests."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._is_user = layout, _gain_privileges()
        self.switch = Switch(layout)
        self._names: list[int] = []
        for host in range(layout.num_hosts):
            unshare(NEW_NAMES)
            set_host_name(f"host{host}")
            self._names.append(os.open("/proc/self/ns/uts", os.O_RDONLY | os.O_CLOEXEC))
            for local_rank in range(layout.ranks_per_host):
                self.switch.connect(host, local_rank)

    def paths(self) -> list[list[dict[str, str]]]:
        """Return the fields of ``Namespaces`` for each host and local rank."""
        process = f"/proc/{os.getpid()}"
        return [
            [
                {
                    "network": f"{process}/fd/{self.switch.of_ranks[host, local_rank].descriptor}",
                    "names": f"{process}/fd/{self._names[host]}",
                    "user": f"{process}/ns/user" if self._is_user else "",
                }
                for local_rank in range(self._layout.ranks_per_host)
            ]
            for host in range(self._layout.num_hosts)
        ]

    def close(self) -> None:
        """Release the namespaces, then kill all processes in them."""
        inodes = {namespace.inode for namespace in self.switch.of_ranks.values()}
        for namespace in (self.switch.namespace, *self.switch.of_ranks.values()):
            namespace.close()
        for _ in range(_MAX_SCANS):
            inside = _processes_in(inodes)
            for pid in inside:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has just ended
            if not inside:
                break
            time.sleep(_SECONDS_BETWEEN_SCANS)
        for inode in inodes:  # killed workers leave the board of their network
            remove_boards("rails", inode)


def _gain_privileges() -> bool:
    """Become able to make namespaces; return whether that took a user namespace."""
    try:
        unshare(NEW_NETWORK)
    except OSError:
        try:
            become_root()
            unshare(NEW_NETWORK)
        except OSError as error:
            raise RuntimeError(f"{_REMEDY} ({error.strerror})") from error
        return True
    return False


def _processes_in(inodes: set[int]) -> list[int]:
    """Return the processes in these network namespaces, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                inode = (entry / "ns" / "net").stat().st_ino
            except OSError:
                continue  # it has ended, or is another user's
            if inode in inodes:
                found.append(int(entry.name))
    return found


def _answer(result: object = None, error: str = "") -> None:
    sys.stdout.write(json.dumps({"result": result, "error": error}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Make the testbed, answer requests until stdin ends, and clean up."""
    try:
        keeper = Keeper(Layout(**json.loads(sys.argv[1])))
    except Exception as error:  # noqa: BLE001  any error is reported to the parent
        _answer(error=str(error))
        return
    _answer(keeper.paths())
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                _answer(getattr(keeper.switch, request["method"])(**request["arguments"]))
            except Exception as error:  # noqa: BLE001  as above
                _answer(error=f"{request['method']}: {error}")
    finally:
        keeper.close()


if __name__ == "__main__":
    main()

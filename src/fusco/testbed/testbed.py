"""Testbed: a context manager that makes hosts, starts processes on them and changes their network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import IO, Any

from fusco.core.environment import RAILS_VARIABLE
from fusco.core.errors import FuscoError
from fusco.testbed.layout import Layout, interface, parse_rate
from fusco.testbed.namespaces import Namespaces

# Limit of the end of the processes in the namespaces, which are killed.
_CLOSING_S = 10.0
_PORT = 29500  # of the store, on host 0
# Limit of the other ranks' end once one has failed.
_GRACE_S = 30.0
_POLL_S = 0.05


class TestbedError(FuscoError):
    """A testbed could not be made, or its network could not be changed."""

    __test__ = False  # not a test, in spite of its name


@dataclass(frozen=True)
class RailCounters:
    """Bytes that a host has sent and received on a rail since the testbed was made, headers included."""

    sent_bytes: int
    received_bytes: int


class Testbed(AbstractContextManager["Testbed"]):
    """Hosts with rate-limited rails (NICs) on a switch, on this machine; for tests and benchmarks of networks.

    Every host is a network namespace with its own host name. Rail r of each host is interface ``rail{r}``, with an
    address of its own; any rail reaches any other, and each is limited in both directions. There is no route to
    anything outside. Within a host, traffic takes the loopback device.

    With ``ranks_per_host`` above 1, a host has a namespace for each rank, with its share of the rails. So programs
    that cannot choose their NIC, such as gloo, use that of their rank. Ranks of a host reach each other by an
    unlimited link instead of the loopback device, with the same addresses, and they share memory as before.

    A process of its own, the keeper, holds the namespaces, by descriptors only. It removes them, and kills all
    processes in them, when the testbed is closed or when this process ends in any other way, such as by SIGKILL.

    Attributes:
        layout: hosts, rails, addresses.
    """

    __test__ = False  # not a test, in spite of its name

    def __init__(
        self, num_hosts: int, num_rails: int, rate: int | str, *, ranks_per_host: int = 1, mtu: int = 9000
    ) -> None:
        """Make the hosts.

        Args:
            num_hosts: how many hosts.
            num_rails: rails of each host.
            rate: of each rail and direction, in bits per second, or as text such as ``"500mbit"``; headers count.
            ranks_per_host: namespaces of each host, among which its rails are divided.
            mtu: largest packet, in bytes. Segments of 9000 carry 99.3 % payload, those of 1500 95.6 %.

        Raises:
            ValueError: if such a shape is not possible.
            TestbedError: without the package ``pyroute2``, or if the system forbids namespaces.
        """
        bits = parse_rate(rate) if isinstance(rate, str) else rate
        self.layout = Layout(num_hosts, num_rails, bits, ranks_per_host, mtu)
        if importlib.util.find_spec("pyroute2") is None:
            raise TestbedError("a testbed needs the package pyroute2: pip install 'pyroute2>=0.9.2,<1'")
        self._lock, self._processes = threading.Lock(), list[subprocess.Popen[Any]]()
        self._keeper = subprocess.Popen(  # noqa: S603  this package
            [sys.executable, "-m", "fusco.testbed.keeper", json.dumps(asdict(self.layout))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_with_this_path(os.environ),
            start_new_session=True,  # Ctrl-C is for this process, which then closes the testbed
        )
        try:
            self._namespaces = [[Namespaces(**fields) for fields in host] for host in self._read_answer()]
        except BaseException:
            self.close()
            raise

    def address(self, host: int, rail: int = 0) -> str:
        """Return the IPv4 address of a host's rail."""
        self._check(host, rail)
        return self.layout.address(host, rail)

    def interface(self, rail: int) -> str:
        """Return the name of a rail's interface, the same on every host."""
        self._check(0, rail)
        return interface(rail)

    def namespaces(self, host: int, local_rank: int = 0) -> Namespaces:
        """Return what a process needs to move itself to a host; it can be pickled."""
        self._check(host, 0)
        if not 0 <= local_rank < self.layout.ranks_per_host:
            raise ValueError(f"local rank {local_rank}: a host of this testbed has {self.layout.ranks_per_host}")
        return self._namespaces[host][local_rank]

    def spawn(
        self,
        host: int,
        command: Sequence[str],
        *,
        local_rank: int = 0,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = True,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host and return its process; the arguments are those of ``subprocess.Popen``."""
        fields = json.dumps(asdict(self.namespaces(host, local_rank)))
        process = subprocess.Popen(  # noqa: S603  the command is the caller's
            [sys.executable, "-m", "fusco.testbed.enter", fields, *command],
            env=_with_this_path(os.environ if env is None else env),
            stdout=stdout,
            stderr=stderr,
            text=text,
        )
        self._processes.append(process)
        return process

    def set_rate(self, host: int, rail: int, rate: int | str) -> None:
        """Change the rate of a host's rail, in both directions, also while it carries traffic."""
        bits = parse_rate(rate) if isinstance(rate, str) else rate
        Layout(1, 1, bits)  # raises ValueError for a rate out of range
        self._check(host, rail)
        self._request("set_rate", host=host, rail=rail, rate=bits)

    def set_link(self, host: int, rail: int, *, up: bool) -> None:
        """Take a host's rail down, as if its cable were pulled, or up again; addresses and routes stay."""
        self._check(host, rail)
        self._request("set_link", host=host, rail=rail, state="up" if up else "down")

    def counters(self, host: int, rail: int) -> RailCounters:
        """Return the bytes that a host's rail has carried."""
        self._check(host, rail)
        return RailCounters(*self._request("counters", host=host, rail=rail))

    def close(self) -> None:
        """Kill the processes on all hosts and remove the namespaces."""
        assert self._keeper.stdin
        assert self._keeper.stdout
        try:
            self._keeper.stdin.close()
        except BrokenPipeError:
            pass  # it has died
        try:
            self._keeper.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        for process in self._processes:
            process.kill()  # also one that the keeper could not see
            process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, host: int, rail: int) -> None:
        if not (0 <= host < self.layout.num_hosts and 0 <= rail < self.layout.num_rails):
            raise ValueError(
                f"host {host}, rail {rail}: this testbed has hosts 0 to {self.layout.num_hosts - 1} and rails 0 to "
                f"{self.layout.num_rails - 1}"
            )

    def _request(self, method: str, **arguments: object) -> Any:
        assert self._keeper.stdin
        with self._lock:
            try:
                self._keeper.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
                self._keeper.stdin.flush()
            except (OSError, ValueError) as error:
                raise TestbedError(f"{method}: this testbed is closed, or its keeper has died") from error
            return self._read_answer()

    def _read_answer(self) -> Any:
        assert self._keeper.stdout
        line = self._keeper.stdout.readline()
        if not line:
            raise TestbedError(f"the keeper of this testbed has died, exit code {self._keeper.wait()}")
        answer = json.loads(line)
        if answer["error"]:
            raise TestbedError(answer["error"])
        return answer["result"]


def _with_this_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new interpreter that finds this package where this one has found it."""
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def rank_environment(testbed: Testbed, host: int, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those by which fusco, gloo and NCCL use its rails."""
    layout = testbed.layout
    rails = [interface(rail) for rail in layout.rails_of(local_rank)]
    own = {RAILS_VARIABLE: ",".join(rails)} if len(rails) > 1 else {}
    return own | {
        "RANK": str(host * layout.ranks_per_host + local_rank),
        "WORLD_SIZE": str(layout.num_hosts * layout.ranks_per_host),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": testbed.address(0, 0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": rails[0],
        # No host here has a name server; torch warns of every address that it cannot resolve.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "NCCL_SOCKET_IFNAME": "=" + ",".join(rails),
    }


def exit_code(returncode: int) -> int:
    """Return the exit code of a process for a shell: 128 and the number of the signal that has ended it.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def run_job(testbed: Testbed, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command on every rank of a testbed and return 0, or the exit code of the first that fails.

    ``environment`` is by default that of this process; what torchrun would set is added to it. Once one has failed, the
    others have 30 seconds to end. The exit code of a process that a signal has ended is that of a shell.
    """
    layout, inherited = testbed.layout, os.environ if environment is None else environment
    running = [
        testbed.spawn(host, command, local_rank=rank, env={**inherited, **rank_environment(testbed, host, rank)})
        for host in range(layout.num_hosts)
        for rank in range(layout.ranks_per_host)
    ]
    failed, deadline = 0, float("inf")
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended = [process for process in running if process.poll() is not None]
        running = [process for process in running if process not in ended]
        codes = [exit_code(process.returncode) for process in ended if process.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + _GRACE_S
    for process in running:
        process.kill()
    return failed

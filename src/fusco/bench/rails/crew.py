"""Workers of a benchmark: processes on the hosts of a testbed, each with an endpoint."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fusco.rails import POLICIES, Channel, Endpoint, Limits, Policy, Rail
from fusco.testbed import Namespaces, Testbed

#: What is measured: the policies, and ``fuselink`` as NCCL's plugin has it, which sends in one direction only.
VARIANTS = {**POLICIES, "nccl": replace(POLICIES["fuselink"], name="nccl")}
START_S = 0.1  # from the order to begin to the beginning, which all workers know by then
_ANSWER_S = 90.0  # limit of a role, beyond the seconds that it is told to run


@dataclass(frozen=True)
class Place:
    """Place of a worker in the testbed, with the rails and settings of its host."""

    host: int  # host of the testbed
    worker: int  # number on that host; it owns rail ``worker``
    rails: tuple[Rail, ...]  # of the host
    policy: Policy  # how it uses them
    limits: Limits  # bounds
    board: Path  # the host's board


class Member:
    """A worker, as seen by the benchmark: calls run in its process, one at a time."""

    def __init__(self, place: Place, namespaces: Namespaces) -> None:
        self.place = place
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fusco.bench.rails.roles"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, place, namespaces), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, role: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``role(office, *arguments)`` in the worker; ``result`` waits for it."""
        self._pipe.send((role, arguments))

    def result(self, limit_s: float = _ANSWER_S) -> Any:
        """Return what the role has returned; ``RuntimeError`` if it raised or did not finish within the limit."""
        who = f"worker {self.place.worker} of host {self.place.host}"
        if not self._pipe.poll(limit_s):
            raise RuntimeError(f"{who} has not finished within {limit_s:g} s")
        try:
            result, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{who} has died") from None
        if error:
            raise RuntimeError(f"{who}: {error}")
        return result


class Office:
    """A worker's endpoint and channels, kept between roles; in the worker's process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        options: dict[str, Any] = {"limits": place.limits, "board": place.board}
        self.endpoint: Any
        if place.policy.name == "nccl":
            from fusco.bench.rails.plugin import PluginEndpoint  # noqa: PLC0415  loads torch

            self.endpoint = PluginEndpoint(worker=place.worker, rails=place.rails, policy="fuselink", **options)
        else:
            self.endpoint = Endpoint(worker=place.worker, rails=place.rails, policy=place.policy, **options)
        self.channels: list[Channel] = []


class Crew:
    """The workers of one measurement. Worker w of a host owns rail w."""

    def __init__(self, bed: Testbed, policy: Policy, limits: Limits | None = None, *, num_rails: int = 0) -> None:
        """Prepare; with ``num_rails``, hosts use their first rails only."""
        self._bed, self._policy, self._limits = bed, policy, limits or Limits()
        self._num_rails = num_rails or bed.layout.num_rails
        self._boards = tempfile.TemporaryDirectory(prefix="fusco-rails-", dir="/dev/shm")
        self._members: dict[tuple[int, int], Member] = {}

    def board(self, host: int) -> Path:
        """Return the board of a host."""
        return Path(self._boards.name) / str(host)

    def hire(self, *places: tuple[int, int]) -> list[Member]:
        """Start a worker at each place, (host, worker)."""
        layout = self._bed.layout
        for host, worker in places:
            rails = tuple(
                Rail(self._bed.interface(i), self._bed.address(host, i), (i,), layout.rate)
                for i in range(self._num_rails)
            )
            place = Place(host, worker, rails, self._policy, self._limits, self.board(host))
            self._members[host, worker] = Member(place, self._bed.namespaces(host))
        return [self._members[each] for each in places]

    def hire_pairs(self, num: int) -> tuple[list[Member], list[Member]]:
        """Start ``num`` workers on each of hosts 0 and 1, and connect those of equal numbers."""
        hosts = [self.hire(*((host, worker) for worker in range(num))) for host in (0, 1)]
        self.connect(list(zip(*hosts, strict=True)))
        return hosts[0], hosts[1]

    def connect(self, pairs: Sequence[tuple[Member, Member]]) -> None:
        """Connect workers: each pair gets a channel, which both have as their next one."""
        for client, server in pairs:
            server.begin(_listen)
            client.begin(_connect, server.result())
            server.begin(_accept)
            for each in (client, server):
                each.result()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members.values():
            member.process.kill()
        for member in self._members.values():
            member.process.join()
        self._boards.cleanup()


def _serve(pipe: Connection, place: Place, namespaces: Namespaces) -> None:
    """Run roles until the benchmark ends; the main function of a worker's process."""
    namespaces.enter()
    office = Office(place)
    while True:
        try:
            role, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((role(office, *arguments), ""))
        except Exception:  # noqa: BLE001  told to the benchmark
            pipe.send((None, traceback.format_exc()))


def _listen(office: Office) -> Any:
    return office.endpoint.listen()


def _connect(office: Office, address: Any) -> None:
    office.channels.append(office.endpoint.connect(address))


def _accept(office: Office) -> None:
    office.channels.append(office.endpoint.accept())

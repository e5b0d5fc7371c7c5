"""Workers of a benchmark: processes on the hosts of a testbed, each with an endpoint."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusco.bench.harness.worker import Worker
from fusco.bench.names import MAX_CASE_S
from fusco.rails import POLICIES, Channel, Endpoint, Policy, Rail
from fusco.testbed import Namespaces, Testbed

#: What is measured: the policies, and ``fuselink`` as NCCL's plugin has it, which sends in one direction only.
VARIANTS = {**POLICIES, "nccl": replace(POLICIES["fuselink"], name="nccl")}
START_S = 0.1  # from the order to begin to the beginning, which all workers know by then


@dataclass(frozen=True)
class Place:
    """Place of a worker in the testbed, with the rails of its host."""

    host: int  # host of the testbed
    worker: int  # number on that host; it owns rail ``worker``
    rails: tuple[Rail, ...]  # of the host
    policy: Policy  # how it uses them
    board: Path  # the host's board


class Member(Worker):
    """A worker, as seen by the benchmark: roles, called with its ``Office``, run in its process, one at a time."""

    limit_s = MAX_CASE_S + Worker.limit_s  # a role may last as long as a case

    def __init__(self, place: Place, namespaces: Namespaces) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["fusco.bench.rails.roles"])
        name = f"worker {place.worker} of host {place.host}"
        super().__init__(name, "forkserver", _office, place, namespaces)


def perform(*roles: tuple[Any, ...]) -> list[Any]:
    """Begin all roles, each a member, a function and its arguments, and return their results when all have ended."""
    for member, role, *arguments in roles:
        member.begin(role, *arguments)
    return [member.result() for member, *_ in roles]


class Office:
    """A worker's endpoint and channels, kept between roles; in the worker's process."""

    def __init__(self, place: Place) -> None:
        options: dict[str, Any] = {"worker": place.worker, "rails": place.rails, "board": place.board}
        self.endpoint: Any
        if place.policy.name == "nccl":
            from fusco.bench.rails.plugin import PluginEndpoint  # noqa: PLC0415  loads torch

            self.endpoint = PluginEndpoint(policy="fuselink", **options)
        else:
            self.endpoint = Endpoint(policy=place.policy, **options)
        self.channels: list[Channel] = []


class Crew(AbstractContextManager["Crew"]):
    """The workers of one measurement. Worker w of a host owns rail w."""

    def __init__(self, bed: Testbed, policy: Policy, *, num_rails: int = 0) -> None:
        """Prepare; with ``num_rails``, hosts use their first rails only."""
        self._bed, self._policy, self._num_rails = bed, policy, num_rails or bed.layout.num_rails
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
            place = Place(host, worker, rails, self._policy, self.board(host))
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
            perform((client, _connect, server.call(_listen)), (server, _accept))

    def __exit__(self, *_: object) -> None:
        for member in self._members.values():
            member.process.kill()
        for member in self._members.values():
            member.process.join()
        self._boards.cleanup()


@contextmanager
def _office(place: Place, namespaces: Namespaces) -> Iterator[Office]:
    namespaces.enter()
    yield Office(place)
    os._exit(0)  # the benchmark has ended, and channels may still have peers


def _listen(office: Office) -> Any:
    return office.endpoint.listen()


def _connect(office: Office, address: Any) -> None:
    office.channels.append(office.endpoint.connect(address))


def _accept(office: Office) -> None:
    office.channels.append(office.endpoint.accept())

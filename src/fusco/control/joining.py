"""How a new process finds the members of a communicator: through a store that both know, one key for each message.

The process asks to join (``request``). In a call of ``grow`` the lowest member invites it (``invitation``: the secret,
and who the members are), the process starts its status server and says where (``address``), and the member names all
that join (``start``). From there on both agree and connect as in every change of members. A process that comes too late
finds an empty start, and asks again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from fusco.control.agreement import Member
from fusco.control.bootstrap import host_identity, reachable_address
from fusco.control.liveness import has_ended
from fusco.control.member_board import View
from fusco.control.status_server import StatusServer
from fusco.core.errors import TransportError, first_line
from fusco.core.threads import in_thread

_POLL_S = 0.002
_MOST_POLL_S = 0.02
_REPLY_S = 5.0  # limit of the reply of a process that is invited, which only waits for that; and as a share of
_REPLY = 0.6  # the limit of requests, as members wait for those that invite


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a process is told before it joins.

    Attributes:
        rank: the rank that it will be.
        num_ranks: ranks of the group, absent ones included.
        secret: of the status servers.
        generation: of the members.
        members: as ``Member``, by rank, as text.
        placement: of the experts of all ranks.
    """

    rank: int
    num_ranks: int
    secret: str
    generation: int
    members: dict[str, Any]
    placement: dict[str, Any]


class JoinStore:
    """The keys of one communicator, by its ``name``, in a store; requests have a limit, which a store has not."""

    def __init__(self, store: Store, name: str, limit_s: float) -> None:
        self._store, self.limit_s = PrefixStore(f"fusco/join/{name}", store), limit_s

    def within_limit(self, request: Callable[[], Any]) -> Any:
        """Return the result of a function that uses the store; ``TransportError`` if it fails or takes too long."""
        future, deadline = in_thread(request, "a request to the store"), time.monotonic() + self.limit_s
        while not future.done():
            if time.monotonic() > deadline:
                raise TransportError(f"the store {self._store.underlying_store} has not answered within its limit")
            time.sleep(_POLL_S / 10)
        try:
            return future.result()
        except RuntimeError as error:
            raise TransportError(f"the store cannot be reached: {first_line(error)}") from error

    def put(self, number: int, key: str, value: Any) -> None:
        """Set a key of the ``number``-th process."""
        self._store.set(f"{number}/{key}", json.dumps(value))

    def get(self, number: int, key: str) -> Any:
        """Return the value of a key of the ``number``-th process; ``None`` if it has none."""
        name = f"{number}/{key}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def new_number(self) -> int:
        """Count one more process that asks to join, and return its number."""
        return int(self._store.add("asked", 1))

    def new_requests(self) -> list[int]:
        """Return the numbers of processes that have asked since the last call, on whichever rank."""
        asked, seen = int(self._store.add("asked", 0)), int(self._store.add("seen", 0))
        self._store.add("seen", asked - seen)
        return list(range(seen + 1, asked + 1))

    def num_new_requests(self) -> int:
        """Return how many processes have asked since the last call of ``new_requests``."""
        return int(self._store.add("asked", 0)) - int(self._store.add("seen", 0))


def invite(
    joins: JoinStore, free_ranks: list[int], invitation_of: Callable[[int], Invitation], own: Member
) -> dict[int, Member]:
    """Invite the processes that have asked to join; return those that have come, by rank. Needs no other member."""
    invited: dict[int, int] = {}
    pids: dict[int, int] = {}  # of those of this machine
    deadline = time.monotonic() + min(_REPLY_S, _REPLY * joins.limit_s)

    def reply(number: int, key: str) -> Any:
        """Return what a process says, ``None`` if it has not by then or ends."""
        while (value := joins.get(number, key)) is None and time.monotonic() < deadline:
            if number in pids and has_ended(pids[number]):
                break
            time.sleep(_POLL_S)
        return value

    for number in joins.new_requests():
        request = reply(number, "request")  # a process counts before it says more
        if request is None or (request["host"] == own.host and has_ended(request["pid"])):
            continue
        if request["host"] == own.host:
            pids[number] = request["pid"]
        if not free_ranks:
            joins.put(number, "invitation", {"refusal": "no rank of the group is absent"})
            continue
        rank = request["rank"] if request["rank"] in free_ranks else free_ranks[0]
        free_ranks.remove(rank)
        joins.put(number, "invitation", asdict(invitation_of(rank)))
        invited[number] = rank
    addresses = {rank: reply(number, "address") for number, rank in invited.items()}
    came = members_of({str(rank): address for rank, address in addresses.items() if address})
    for number, rank in invited.items():
        joins.put(number, "start", members_as_text(came) if rank in came else {})
    return came


class Joining:
    """A process that joins: after ``ask`` and ``come`` it has a status server and knows all members."""

    def __init__(self, joins: JoinStore, rank: int | None, timeout_s: float) -> None:
        self._joins, self._wanted = joins, rank
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self.members: dict[int, Member] = {}

    def ask(self) -> Invitation:
        """Ask to join and wait until members call ``grow``; raises ``TransportError`` after the limit."""
        request = {"pid": os.getpid(), "host": host_identity(), "rank": self._wanted}
        self._number: int = self._joins.within_limit(self._joins.new_number)
        self._joins.within_limit(lambda: self._joins.put(self._number, "request", request))
        if (given := self._await("invitation", self._deadline)) is None:
            raise TransportError(f"this process could not join within {self._timeout_s:g} s: no rank has called grow")
        if "refusal" in given:
            raise ValueError(f"this process cannot join: {given['refusal']}")
        return Invitation(**given)

    def come(self, invitation: Invitation) -> StatusServer | None:
        """Start the status server, say where, and wait for the start; ``None`` if that is too late.

        The caller closes the server.
        """
        members, host = members_of(invitation.members), host_identity()
        listen_on = _listening_address(members, host)
        server = StatusServer(invitation.secret, listen_on)
        try:
            view = View(invitation.generation, tuple(sorted({*members, invitation.rank})))
            server.install(view, invitation.rank)
            own = Member(server.address, os.getpid(), host)
            self._joins.within_limit(lambda: self._joins.put(self._number, "address", asdict(own)))
            start = self._await("start", time.monotonic() + self._joins.limit_s)
        except BaseException:
            server.close()
            raise
        if not start:
            server.close()
            return None
        self.members = {**members, **members_of(start)}
        return server

    def _await(self, key: str, deadline: float) -> Any:
        pause_s = _POLL_S
        while (value := self._joins.within_limit(lambda: self._joins.get(self._number, key))) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MOST_POLL_S)
        return value


def members_as_text(members: Mapping[int, Member]) -> dict[str, Any]:
    """Return members as JSON has them."""
    return {str(rank): asdict(member) for rank, member in members.items()}


def members_of(text: Mapping[str, Any]) -> dict[int, Member]:
    """Return the members that ``members_as_text`` has described."""
    return {int(rank): Member(tuple(each["address"]), each["pid"], each["host"]) for rank, each in text.items()}


def _listening_address(members: Mapping[int, Member], host: str) -> str:
    """Return the address by which the members reach this process; ``TransportError`` if they cannot."""
    addresses = {member.host: member.address[0] for member in members.values()}
    if host in addresses and len(addresses) == 1:
        return addresses[host]
    if any(address.startswith("127.") for address in addresses.values()):
        raise TransportError(
            f"the members are reached at {', '.join(addresses.values())} only, from their own machine, as they were "
            f"on one machine when they made the communicator; start this process there"
        )
    return reachable_address(next(iter(addresses.values())))

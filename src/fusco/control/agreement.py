"""Agreement of the ranks that are left on the members of the next generation, whatever fails meanwhile.

Every rank proposes a view to all ranks in it. A rank that receives another view goes on with the intersection of both,
under a higher number; so does one that finds a rank dead, or waits for one for longer than the limit. A view is agreed
once all of its members have proposed it, under the same number. A rank proposes one view for each number, so no two
views of one number are agreed. Agreed members then connect (``MemberGather``); a view under a higher number that comes
before that is complete ends it, and they agree again. A generation's collectives need all of its members, and a member
that has gone on to a higher number takes part in none: so of two generations at most one ever completes a call.

Views only shrink, so agreement ends. Nothing here decides by majority, since whole nodes may go: ranks that cannot
reach each other go on apart, unless the caller demands a number of members.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fusco.control.liveness import Liveness
from fusco.control.member_board import Exclusion, View, excluded
from fusco.control.rank_requests import is_local_failure
from fusco.control.status_server import Address, NoAnswer, StatusServer
from fusco.core.errors import PeerFailureError, Stall

JOINING = ("grow", "join")  # operations in which processes join
_REMINDER_S = 0.2
_TURN_S = 0.002  # between looks at what others have proposed
_PING_S = 1.0  # limit of the answer of a rank of another machine that a failure has named
_NOTICE_S = 1.0  # limit of the delivery of notices to ranks that are left out; a stopped one reads it later


@dataclass(frozen=True)
class Member:
    """A rank that takes part: the address of its status server, its process, and its machine."""

    address: Address
    pid: int
    host: str


class Agreement(AbstractContextManager["Agreement"]):
    """The part of one rank in the agreement; the end of a ``with`` gives up its requests.

    Errors name ``operation``. In those of ``JOINING`` ranks raise if any fails meanwhile, so that all of them shrink:
    some may be through, and their next call fails. In others they go on without it.
    """

    def __init__(
        self,
        status_server: StatusServer,
        rank: int,
        members: Mapping[int, Member],
        limit_s: float,
        operation: str = "shrink",
    ) -> None:
        """``members`` are all ranks that may be in a view, with this one, by number; ``limit_s`` limits each wait."""
        self.operation, self._server, self._board = operation, status_server, status_server.board
        self._rank, self._limit_s = rank, limit_s
        self._members = dict(members)
        host = members[rank].host
        near = {other: each.pid for other, each in members.items() if each.host == host and other != rank}
        self._liveness, self._requests = Liveness(near), status_server.requests()
        self._gone: set[int] = set()  # ranks that do not listen any more
        self._progress_at = self._sent_at = 0.0
        self._asking: set[int] = set()  # ranks that have not answered the latest view yet

    def __exit__(self, *_: object) -> None:
        self._liveness.close()
        self._requests.close()

    def silent(self, ranks: Iterable[int]) -> set[int]:
        """Return which of these ranks, which a failure has named, are dead or stopped, and all others that are dead.

        On other machines those that do not answer within a short time; here the system says it, so none that is only
        slow is meant.
        """
        others = {rank: self._members[rank] for rank in ranks if rank != self._rank}
        near = {rank: each.pid for rank, each in others.items() if each.host == self._members[self._rank].host}
        asked = {rank: each.address for rank, each in others.items() if rank not in near}
        answers = self._server.ask(asked, _PING_S).items()
        silent = {rank: each for rank, each in answers if isinstance(each, NoAnswer)}
        self._gone |= {rank for rank, each in silent.items() if each.has_left}
        stopped = {rank for rank, pid in near.items() if _is_stopped(pid)}
        return {*silent, *stopped, *(rank for rank in self._members if self.is_dead(rank))}

    def is_dead(self, rank: int) -> bool:
        """Return whether a rank's process has ended, or has closed its communicator."""
        return rank in self._gone or self._liveness.is_dead(rank)

    def agree(self, ranks: Iterable[int], *, is_planned: bool = False) -> View:
        """Propose ``ranks`` and return what all of its members have agreed on.

        Raises ``ExcludedError``, or ``PeerFailureError`` if one fails and ``operation`` is one of ``JOINING``.
        """
        number = self._board.next_number(list(self._members))
        view = View(number, tuple(sorted({*ranks, self._rank})), is_planned)
        while True:
            self._propose(view)
            self._progress_at = time.monotonic()
            while (revised := self._revised(view)) is view:
                if self._is_agreed(view) and not self._asking.intersection(view.members):
                    return view
                self._remind(view)
                if len(self._requests):
                    self._requests.turn(_TURN_S)
                else:
                    time.sleep(_TURN_S)
            if self.operation in JOINING and not revised.is_planned:
                raise self._failure(view, revised)
            view = revised

    def _propose(self, view: View) -> None:
        """Send a view to its members, this rank included: its server has then read all that others sent before.

        A process that was stopped may have been told long ago that it is left out, by ranks that have ended since.
        """
        self._board.proposed = view
        for rank in view.members:
            self._send(rank, view)
        self._sent_at = time.monotonic()

    def _remind(self, view: View) -> None:
        """Send the view again to ranks that have not agreed: one that has ended does not listen any more."""
        if time.monotonic() - self._sent_at < _REMINDER_S:
            return
        self._sent_at = time.monotonic()
        for rank in set(view.members) - self._asking - {self._rank}:
            if self._board.views.get(rank) != view:
                self._send(rank, view)

    def _send(self, rank: int, view: View) -> None:
        message = {
            "sender": self._rank,
            "base": self._board.installed.number,
            "number": view.number,
            "members": list(view.members),
            "is_planned": view.is_planned,
        }
        body = json.dumps({"view": message}).encode()
        self._asking.add(rank)
        self._requests.add(self._members[rank].address, body, lambda outcome: self._note(outcome, rank, view))

    def _note(self, outcome: bytes | OSError, rank: int, view: View) -> None:
        if self._board.proposed is not view:
            return  # the answer to an earlier view
        self._asking.discard(rank)
        if isinstance(outcome, OSError):
            self.note_failure(outcome, rank)
            return
        answer = json.loads(outcome)
        if (excluded := answer.get("excluded")) and self._board.exclusion is None:
            self._board.exclusion = Exclusion(tuple(excluded["members"]), int(excluded["told_by"]))

    def note_failure(self, error: OSError, rank: int) -> None:
        """Note why a rank could not be reached: it is gone, unless this process has no descriptor, for example."""
        if not is_local_failure(error):
            self._gone.add(rank)

    def _revised(self, view: View) -> View:
        """Return the view to propose next: this one, unless something has happened."""
        if exclusion := self._board.exclusion:
            raise excluded(self._rank, self.operation, exclusion)
        others = [rank for rank in view.members if rank != self._rank]
        left, newest = set(view.members), view.number
        left -= {rank for rank in others if self.is_dead(rank)}
        if time.monotonic() - self._progress_at > self._limit_s:
            views = self._board.views  # one that has proposed a newer view is not late
            left -= {rank for rank in others if rank not in views or views[rank].number < view.number}
            left -= {rank for rank in self._asking.intersection(others) if views.get(rank) == view}  # stopped since
            self._asking.discard(self._rank)
        for rank in others:
            theirs = self._board.views.get(rank)
            if rank not in left or theirs is None or theirs.number <= self._board.installed.number:
                continue
            left &= {*theirs.members, self._rank}
            if theirs.members != view.members or theirs.number > view.number:
                newest = max(newest, theirs.number)
        if left != set(view.members):
            return View(newest + 1, tuple(sorted(left)))
        is_planned = view.is_planned and not self._shrinking(view)
        if newest == view.number and is_planned == view.is_planned:
            return view
        return View(newest + (newest == view.number), view.members, is_planned)

    def _failure(self, view: View, revised: View) -> PeerFailureError:
        """Return the error of a view that is not agreed on, as others fail or shrink."""
        peers = tuple(rank for rank in view.members if rank not in revised.members) or self._shrinking(view)
        stall = Stall("agreeing on the members", peers, f"all {len(view.members)} ranks", f"{len(revised.members)}")
        reason = "the process has ended, has come too late, or is left out by others, which have called shrink"
        return PeerFailureError(
            rank=self._rank, peers=peers, operation=self.operation, stall=stall, reason=reason, has_left=False
        )

    def _shrinking(self, view: View) -> tuple[int, ...]:
        """Return the members of a view that propose one as new, or newer, which nobody has planned."""
        views = self._board.views
        return tuple(
            rank
            for rank in view.members
            if rank in views and views[rank].number >= view.number and not views[rank].is_planned
        )

    def _is_agreed(self, view: View) -> bool:
        """Return whether all members have proposed the view."""
        return all(rank == self._rank or self._board.views.get(rank) == view for rank in view.members)


def _is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped, by a signal or a debugger."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False  # it has ended, which others say
    return state in "Tt"


def notify_excluded(server: StatusServer, view: View, told_by: int, addresses: Mapping[int, Address]) -> None:
    """Tell ranks, at ``addresses``, that a generation goes on without them; a stopped one reads it later."""
    notice = {"number": view.number, "members": list(view.members), "told_by": told_by}
    server.request(addresses, {"exclusion": notice}, _NOTICE_S)

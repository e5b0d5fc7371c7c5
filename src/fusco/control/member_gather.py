"""All-gather of small values among the members of a generation, through their status servers, while they connect."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, TypeAlias

from fusco.control.agreement import Agreement, Member
from fusco.control.member_board import View
from fusco.control.status_server import FailureReport, StatusServer
from fusco.control.store_gather import StoreGather
from fusco.control.watchdog import Watchdog
from fusco.core.errors import PeerFailureError, Stall

_REMINDER_S = 0.2
_PAUSE_S = 0.0005
_REPORTING_S = 1.0


Gather: TypeAlias = "StoreGather | MemberGather"


class MemberGather:
    """All-gathers of JSON values among the members of an agreed view, with the methods of ``StoreGather``.

    Attributes:
        rank: this rank among the members.
        world_size: number of members.
        members: the number of each in the group.
        num_ranks: ranks of the group, absent ones included.
        number: of the generation.
        name: unique.
        status_server: that of this rank, which goes on.
    """

    def __init__(
        self,
        status_server: StatusServer,
        agreement: Agreement,
        view: View,
        rank: int,
        members: Mapping[int, Member],
        num_ranks: int,
        timeout_s: float,
    ) -> None:
        """``rank`` is this rank's number in the group, and ``agreement`` knows who has died."""
        self.status_server, self._agreement, self._view, self._members = status_server, agreement, view, members
        self.members, self.rank = view.members, view.members.index(rank)
        self.world_size, self.num_ranks, self.timeout_s = len(view.members), num_ranks, timeout_s
        self.number, self.name = view.number, f"fusco/generation {view.number} of {status_server.secret[:8]}"
        self._number = rank
        self._watcher: Watchdog | None = None

    def begin(self) -> None:
        """Begin the generation on this rank, if it has not begun."""
        self.status_server.install(self._view, self._number)

    @property
    def by_number(self) -> Mapping[int, Member]:
        """The members, by their number in the group."""
        return {number: self._members[number] for number in self.members}

    @property
    def secret(self) -> str:
        """A secret of this generation, which its members derive from that of all."""
        return hmac.digest(self.status_server.secret.encode(), self.name.encode(), "sha256").hex()

    @property
    def store_host(self) -> str:
        """An address that leads to another machine of a member, or to this one if there is none."""
        own = self._members[self._number]
        others = (each.address[0] for each in self._members.values() if each.host != own.host)
        return next(others, own.address[0])

    def watched_by(self, watcher: Watchdog) -> None:
        """From now on wait through a watchdog."""
        self._watcher = watcher

    def wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], Stall]) -> None:
        """Wait for a condition; raises ``PeerFailureError`` after the limit, or if a member agrees again meanwhile."""

        def is_ready_or_over() -> bool:
            self._require_view(stall)
            return is_ready()

        if self._watcher:
            self._watcher.wait_until(is_ready_or_over, stall)
            return
        deadline = time.monotonic() + self.timeout_s
        while not is_ready_or_over():
            time.sleep(_PAUSE_S)
            waiting = stall()
            if gone := tuple(rank for rank in waiting.on_ranks if self._agreement.is_dead(self.members[rank])):
                self._raise(waiting, gone, "the process has ended, or has closed its communicator")
            if report := self.status_server.failure_report:
                self._raise(waiting, report.peers, report.reason)
            if time.monotonic() > deadline:
                self._raise(waiting, waiting.on_ranks, f"nothing has come within {self.timeout_s:g} s")

    def all_gather(self, stage: str, value: Any) -> list[Any]:
        """Publish a value and return those of all members, by rank; raises as ``wait_until``."""
        values = self.status_server.board.values(self.number, stage)
        values[self.rank] = json.loads(json.dumps(value))
        message = {"number": self.number, "stage": stage, "sender": self.rank, "value": value}
        with _Delivery(self, json.dumps({"value": message}).encode()) as delivery:

            def stall() -> Stall:
                late = set(range(self.world_size)) - values.keys() | delivery.asking
                seen = f"{self.world_size - len(late)}"
                return Stall(stage, tuple(sorted(late)), f"all {self.world_size} ranks", seen)

            def is_complete() -> bool:
                delivery.advance(values)
                return len(values) == self.world_size and not delivery.asking

            self.wait_until(is_complete, stall)
        return [values[rank] for rank in range(self.world_size)]

    def note_failure(self, error: OSError, rank: int) -> None:
        """Note why a member could not be reached."""
        self._agreement.note_failure(error, self.members[rank])

    def fail(self, stall: Stall, reason: str) -> NoReturn:
        """Raise ``PeerFailureError`` for the ranks of a wait that cannot end; a watchdog tells all other members."""
        if self._watcher:
            self._watcher.find_fault(stall, reason)
        self._raise(stall, stall.on_ranks, reason)

    def part(self, without: Sequence[int] = (), reason: str = "") -> None:  # noqa: ARG002  of a ``StoreGather``
        """Tell the other members that this rank fails, if there is a ``reason``."""
        if not reason:
            return
        report = FailureReport((self.rank,), reason, self.rank, has_left=False)
        numbers = enumerate(self.members)
        peers = {rank: self._members[number].address for rank, number in numbers if rank != self.rank}
        self.status_server.report_failure(peers, report, min(_REPORTING_S, self.timeout_s))

    def _require_view(self, stall: Callable[[], Stall]) -> None:
        """Raise if a member agrees again. One that does so as planned is through with this gather.

        Also if all values have come: the generation is over, and what they say, such as addresses, may be so, too.
        """
        views = self.status_server.board.views
        for rank, number in enumerate(self.members):
            if (theirs := views.get(number)) and theirs.number > self.number and not theirs.is_planned:
                gone = [i for i, member in enumerate(self.members) if member not in theirs.members]
                self._raise(stall(), gone or (rank,), f"rank {number} agrees on other members again: {theirs.members}")

    def _raise(self, stall: Stall, ranks: Sequence[int], reason: str) -> NoReturn:
        numbers = tuple(self.members[rank] for rank in ranks)
        named = Stall(stall.phase, numbers, stall.expected, stall.seen)
        operation = self._agreement.operation
        raise PeerFailureError(
            rank=self._number, peers=numbers, operation=operation, stall=named, reason=reason, has_left=False
        )


class _Delivery(AbstractContextManager["_Delivery"]):
    """One message to all other members, sent again to those that are awaited: one that has ended does not listen.

    A member that has answered once has the value. It may go on and answer nothing for a while, such as a reminder.
    """

    def __init__(self, gather: MemberGather, body: bytes) -> None:
        self._gather, self._body, self._requests = gather, body, gather.status_server.requests()
        self._addresses = [gather.by_number[number].address for number in gather.members]
        self.asking = set(range(gather.world_size)) - {gather.rank}  # ranks that have not answered
        self._reminded: set[int] = set()  # and have not answered that
        for rank in self.asking:
            self._send(rank, self.asking)
        self._sent_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._requests.close()

    def advance(self, values: Mapping[int, Any]) -> None:
        """Do what is possible now; ``values`` have come."""
        self._requests.turn(0.0)
        if time.monotonic() - self._sent_at > _REMINDER_S:
            self._sent_at = time.monotonic()
            for rank in set(range(self._gather.world_size)) - values.keys() - self.asking - self._reminded:
                self._reminded.add(rank)
                self._send(rank, self._reminded)

    def _send(self, rank: int, waiting: set[int]) -> None:
        self._requests.add(self._addresses[rank], self._body, partial(self._note, rank, waiting))

    def _note(self, rank: int, waiting: set[int], outcome: bytes | OSError) -> None:
        waiting.discard(rank)
        if isinstance(outcome, OSError):
            self._gather.note_failure(outcome, rank)

"""Server thread of a rank: reports its status to ranks that ask, and receives reports of failures and departures.

It answers whenever its process runs, also while the main thread computes or waits, so a rank that does not answer is
dead, stopped or unreachable. It costs nothing until a rank asks. Requests and answers are JSON, in a ``hello`` by the
secret that the ranks have shared since the communicator was made. What comes without the secret is not parsed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from fusco.control.member_board import MemberBoard, View
from fusco.control.rank_requests import Requests, RequestServer, ask_all, is_local_failure

Address: TypeAlias = tuple[str, int]  # IPv4 address and port of a rank's status server
# Of what is not a request of a rank, despite the secret.
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_MAX_REASON_CHARS = 8000  # as JSON, with room to spare in a request


@dataclass(frozen=True)
class Status:
    """Progress of a rank: its latest collective by number and name, the phase (``""`` outside) and its duration.

    ``elsewhere`` is the collective of another communicator that the rank is in, if it is outside those of this one.
    ``generation`` counts the sets of members, see ``MemberBoard``.
    """

    collective: int
    operation: str
    phase: str
    seconds: float
    elsewhere: str = ""
    generation: int = 0


@dataclass(frozen=True)
class NoAnswer:
    """A rank reported no status; ``has_left`` if its process has ended or has closed its communicator."""

    reason: str
    has_left: bool


@dataclass(frozen=True)
class Unasked:
    """A rank could not be asked because of this process, which has no descriptor left, for example."""

    reason: str


@dataclass(frozen=True)
class FailureReport:
    """Ranks at fault, and the reason.

    ``found_by`` is the rank that reports it; ``has_left`` is true if all ranks at fault are dead or have left.
    """

    peers: tuple[int, ...]
    reason: str
    found_by: int
    has_left: bool


class StatusServer:
    """Reports this rank's status to other ranks, and sends them questions and reports.

    It outlives generations of members, so that a rank that was left out learns it. Reports are of one generation.

    Attributes:
        board: what ranks say about the next members.
        is_held: ``close`` does nothing while it is true, as the next generation goes on with this server.
    """

    def __init__(self, secret: str, host: str, siblings: set[StatusServer] | None = None) -> None:
        """Start the thread; raises ``OSError`` if this process cannot listen on ``host``.

        ``siblings`` are the open servers of this process's communicators, which this one joins.
        """
        self._secret = secret.encode()
        self._doing = (0, "", "", time.monotonic())
        self.failure_report: FailureReport | None = None
        self.departures: dict[int, str] = {}  # ranks that have left, and why
        self.board, self.is_held = MemberBoard(), False
        self._notes = {"view": self._note_view, "exclusion": self.board.note_exclusion}
        self._installing = threading.Lock()
        self._early: dict[int, list[dict[str, Any]]] = {}  # reports of later generations
        self._server = RequestServer(host, self._secret, self._answer_request, self._note_value)
        self.address = (host, self._server.port)
        self._siblings = set() if siblings is None else siblings
        self._siblings.add(self)

    def install(self, view: View, rank: int) -> None:
        """Begin a generation of members, one of which is this rank, ``rank``; reports of earlier ones count no more."""
        with self._installing:
            self.board.install(view, rank)
            self.failure_report, self.departures = None, {}
            self._doing = (0, "", "", time.monotonic())
            self._siblings.add(self)
            for number in [number for number in self._early if number <= view.number]:
                for request in self._early.pop(number):
                    self._note_report(request)

    def requests(self) -> Requests:
        """Return requests to other ranks, for one thread."""
        return Requests(self._secret)

    @property
    def secret(self) -> str:
        """What a process must know to be a member."""
        return self._secret.decode()

    def note(self, collective: int, operation: str, phase: str) -> float:
        """Set this rank's status, and return the time; called at every change of phase, so it must be cheap."""
        now = time.monotonic()
        self._doing = (collective, operation, phase, now)
        return now

    @property
    def status(self) -> Status:
        """The status that this rank reports now."""
        collective, operation, phase, since = self._doing
        doing = [] if phase else [each._doing for each in tuple(self._siblings)]  # noqa: SLF001  of this class
        elsewhere = next((name for _, name, its_phase, _ in doing if its_phase), "")
        return Status(collective, operation, phase, time.monotonic() - since, elsewhere, self.board.installed.number)

    def request(
        self, addresses: Mapping[int, Address], request: dict[str, Any], timeout_s: float
    ) -> dict[int, bytes | OSError]:
        """Send a request to ranks, all at once; return each one's answer within ``timeout_s``, or the error."""
        request["generation"] = self.board.installed.number
        outcomes = ask_all(list(addresses.values()), self._secret, json.dumps(request).encode(), timeout_s)
        return dict(zip(addresses, outcomes, strict=True))

    def ask(self, addresses: Mapping[int, Address], timeout_s: float) -> dict[int, Status | NoAnswer | Unasked]:
        """Ask ranks for their status, all at once, within ``timeout_s`` seconds."""
        outcomes = self.request(addresses, {"ask": "status"}, timeout_s)
        return {rank: _status_of(outcome, addresses[rank], timeout_s) for rank, outcome in outcomes.items()}

    def report_failure(self, addresses: Mapping[int, Address], failure_report: FailureReport, timeout_s: float) -> None:
        """Send a failure report to ranks, all at once; ranks that cannot be reached are skipped."""
        report = asdict(replace(failure_report, reason=failure_report.reason[:_MAX_REASON_CHARS]))
        self.request(addresses, {"failure": report}, timeout_s)

    def report_departure(self, addresses: Mapping[int, Address], rank: int, reason: str, timeout_s: float) -> None:
        """Report that this rank, ``rank``, has left, to ranks all at once; ranks that cannot be reached are skipped."""
        self.request(addresses, {"departure": {"rank": rank, "reason": reason[:_MAX_REASON_CHARS]}}, timeout_s)

    def leave_siblings(self) -> None:
        """Count no more for the status of others: the call in which this communicator failed is not under way."""
        self._siblings.discard(self)

    def close(self) -> None:
        """Stop listening, unless it is held."""
        self.leave_siblings()
        if not self.is_held:
            self._server.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of a rank."""
        for kind, note in self._notes.items():
            if kind in request:
                return note(request[kind])
        if "ask" not in request:
            with self._installing:
                self._note_report(request)
            return {}
        return asdict(self.status)

    def _note_report(self, request: dict[str, Any]) -> None:
        """Note a report of this generation; keep one of a later generation until it begins."""
        if (generation := int(request.get("generation", 0))) != self.board.installed.number:
            if generation > self.board.installed.number:
                self._early.setdefault(generation, []).append(request)
        elif "failure" in request:
            report = request["failure"]
            self.failure_report = self.failure_report or FailureReport(**{**report, "peers": tuple(report["peers"])})
        else:
            departure = request["departure"]
            self.departures.setdefault(int(departure["rank"]), str(departure["reason"]))

    def _note_view(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note a view; unless all ranks are about to propose one, a call of this rank that is under way fails."""
        answer, board = self.board.note_view(message), self.board
        members, sender, is_agreeing = board.installed.members, int(message["sender"]), board.proposed is not None
        is_newer = int(message["number"]) > board.installed.number and not message["is_planned"]
        if is_newer and not is_agreeing and sender in members and not answer and self.failure_report is None:
            gone = tuple(i for i, rank in enumerate(members) if rank not in message["members"])
            peers = gone or (members.index(sender),)
            text = f"rank {sender} has called shrink, to go on with rank(s) {', '.join(map(str, message['members']))}"
            self.failure_report = FailureReport(peers, text, members.index(sender), has_left=False)
        return answer

    def _answer_request(self, request: bytes) -> bytes | None:
        try:
            message = json.loads(request)
            return b"{}" if "value" in message else json.dumps(self.answer(message)).encode()
        except _FOREIGN:
            return None

    def _note_value(self, request: bytes) -> None:
        """Note a value of an all-gather, now that its sender has the answer.

        With the last one the main thread goes on, and may hold the interpreter's lock until the sender goes on, too.
        """
        with contextlib.suppress(*_FOREIGN):
            message = json.loads(request)
            if "value" in message:
                self.board.note_value(message["value"])


def _status_of(outcome: bytes | OSError, address: Address, timeout_s: float) -> Status | NoAnswer | Unasked:
    if isinstance(outcome, TimeoutError):
        return NoAnswer(f"does not answer within {timeout_s:.1f} s: stopped, hung or unreachable", has_left=False)
    if isinstance(outcome, OSError) and is_local_failure(outcome):
        return Unasked(f"could not be asked: {outcome.strerror}")
    try:
        if isinstance(outcome, OSError):
            raise outcome
        return Status(**json.loads(outcome))
    except (OSError, ValueError, TypeError) as error:
        return NoAnswer(f"is dead or has left ({address[0]}:{address[1]}: {error})", has_left=True)

"""Answers "what are you doing?" for a rank, and takes in "rank 3 is at fault" and "rank 3 has left".

It answers whenever its process runs, also while the main thread computes or waits, so a rank that does not answer is
dead, stopped or unreachable. It costs nothing as long as nobody asks. Requests are single lines over TCP: a secret that
the ranks share since the communicator was made, then JSON. Nothing is parsed that does not begin with the secret.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fusco.control.answering import Answerer
from fusco.control.asking import ask_all, is_own_failure

_MAX_REASON_CHARS = 8000  # as JSON, with room to spare in a line


@dataclass(frozen=True)
class Status:
    """What a rank is doing: its latest collective, by number and name; the phase, ``""`` outside; for how long."""

    collective: int
    operation: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class NoAnswer:
    """A rank gave no status, and how; ``has_left`` if its process is gone or has closed its communicator."""

    reason: str
    has_left: bool


@dataclass(frozen=True)
class Unasked:
    """A rank could not be asked, for a reason of this process (no descriptor left, for example)."""

    reason: str


@dataclass(frozen=True)
class FailureReport:
    """Which ranks are at fault, and how that showed.

    ``found_by`` is the rank that found out; ``has_left`` is true if all of them are dead or have left.
    """

    peers: tuple[int, ...]
    reason: str
    found_by: int
    has_left: bool


@dataclass(frozen=True)
class StatusServerAddress:
    """Where a rank's sentinel listens."""

    host: str
    port: int


class StatusServer:
    """Answers other ranks' questions about this rank; asks and tells them in turn."""

    def __init__(self, secret: str, host: str) -> None:
        """Begin to answer; ``OSError`` if this process cannot listen there."""
        self._secret = secret.encode()
        self._doing = (0, "", "", time.monotonic())
        self.failure_report: FailureReport | None = None
        self.departures: dict[int, str] = {}  # ranks that said that they left, and why
        self._answerer = Answerer(host, self._answer_line)
        self.address = StatusServerAddress(host, self._answerer.port)

    def note(self, collective: int, operation: str, phase: str) -> None:
        """Set what this rank will answer; called at every change of phase, so it must be cheap."""
        self._doing = (collective, operation, phase, time.monotonic())

    @property
    def status(self) -> Status:
        """What this rank answers now."""
        collective, operation, phase, since = self._doing
        return Status(collective, operation, phase, time.monotonic() - since)

    def ask(
        self, addresses: Mapping[int, StatusServerAddress], timeout_s: float
    ) -> dict[int, Status | NoAnswer | Unasked]:
        """Ask ranks for their status, all at once."""
        outcomes = self._request(addresses, {"ask": "status"}, timeout_s)
        return {rank: _status_of(outcome, addresses[rank], timeout_s) for rank, outcome in outcomes.items()}

    def tell(
        self, addresses: Mapping[int, StatusServerAddress], failure_report: FailureReport, timeout_s: float
    ) -> None:
        """Tell ranks a verdict, all at once; those that cannot be reached are passed over."""
        told = asdict(replace(failure_report, reason=failure_report.reason[:_MAX_REASON_CHARS]))
        self._request(addresses, {"tell": told}, timeout_s)

    def tell_departure(
        self, addresses: Mapping[int, StatusServerAddress], rank: int, reason: str, timeout_s: float
    ) -> None:
        """Tell ranks that this one, ``rank``, has left, all at once; those that cannot be reached are passed over."""
        self._request(addresses, {"leave": {"rank": rank, "reason": reason[:_MAX_REASON_CHARS]}}, timeout_s)

    def close(self) -> None:
        """Stop listening."""
        self._answerer.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of a rank."""
        if "tell" in request:
            told = request["tell"]
            if self.failure_report is None:
                self.failure_report = FailureReport(
                    tuple(told["peers"]), told["reason"], told["found_by"], told["has_left"]
                )
            return {}
        if "leave" in request:
            self.departures.setdefault(int(request["leave"]["rank"]), str(request["leave"]["reason"]))
            return {}
        return asdict(self.status)

    def _answer_line(self, line: bytes) -> bytes | None:
        secret, _, request = line.partition(b" ")
        if not hmac.compare_digest(secret, self._secret):
            return None
        try:
            return json.dumps(self.answer(json.loads(request))).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None  # it knows the secret, and yet is no rank

    def _request(
        self, addresses: Mapping[int, StatusServerAddress], request: dict[str, Any], timeout_s: float
    ) -> dict[int, bytes | OSError]:
        line = self._secret + b" " + json.dumps(request).encode() + b"\n"
        at = [(address.host, address.port) for address in addresses.values()]
        return dict(zip(addresses, ask_all(at, line, timeout_s), strict=True))


def _status_of(outcome: bytes | OSError, address: StatusServerAddress, timeout_s: float) -> Status | NoAnswer | Unasked:
    if isinstance(outcome, TimeoutError):
        return NoAnswer(f"does not answer within {timeout_s:.1f} s: stopped, hung or unreachable", has_left=False)
    if isinstance(outcome, OSError) and is_own_failure(outcome):
        return Unasked(f"could not be asked: {outcome.strerror}")
    try:
        if isinstance(outcome, OSError):
            raise outcome
        return Status(**json.loads(outcome))
    except (OSError, ValueError, TypeError) as error:
        return NoAnswer(f"is dead or has left ({address.host}:{address.port}: {error})", has_left=True)

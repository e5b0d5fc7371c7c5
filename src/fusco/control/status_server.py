"""A thread in each rank that answers "what are you doing?" and takes in "rank 3 is at fault".

It answers whenever its process runs, also while the main thread computes or waits, so a rank that does not answer is
dead, stopped or unreachable. It costs nothing as long as nobody asks. Requests are single lines of JSON over TCP, and
carry a secret that the ranks share since the communicator was made.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Status:
    """What a rank is doing: its latest collective, by number and name; the phase, ``""`` outside; for how long."""

    collective: int
    operation: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class Silence:
    """A rank gave no status, and how; ``has_left`` if its process is gone or has closed its communicator."""

    reason: str
    has_left: bool


@dataclass(frozen=True)
class Verdict:
    """Which ranks are at fault, and how that showed.

    ``found_by`` is the rank that found out; ``has_left`` is true if all of them are dead or have left.
    """

    peers: tuple[int, ...]
    reason: str
    found_by: int
    has_left: bool


@dataclass(frozen=True)
class SentinelAddress:
    """Where a rank's sentinel listens."""

    host: str
    port: int


class Sentinel:
    """Answers other ranks' questions about this rank; asks and tells them in turn."""

    def __init__(self, secret: str, host: str) -> None:
        self._secret = secret
        self._doing = (0, "", "", time.monotonic())
        self.verdict: Verdict | None = None
        self._server = _Server((host, 0), self)
        self._thread = threading.Thread(target=self._server.serve_forever, name="fusco-sentinel", daemon=True)
        self._thread.start()
        self.address = SentinelAddress(host, self._server.server_address[1])

    def note(self, collective: int, operation: str, phase: str) -> None:
        """Set what this rank will answer; called at every change of phase, so it must be cheap."""
        self._doing = (collective, operation, phase, time.monotonic())

    @property
    def status(self) -> Status:
        """What this rank answers now."""
        collective, operation, phase, since = self._doing
        return Status(collective, operation, phase, time.monotonic() - since)

    def ask(self, addresses: Mapping[int, SentinelAddress], timeout_s: float) -> dict[int, Status | Silence]:
        """Ask ranks for their status, all at once."""

        def ask_one(address: SentinelAddress) -> Status | Silence:
            try:
                return Status(**self._request(address, {"ask": "status"}, timeout_s))
            except TimeoutError:
                return Silence(
                    f"does not answer within {timeout_s:.1f} s: stopped, hung or unreachable", has_left=False
                )
            except (OSError, ValueError, TypeError) as error:
                return Silence(f"is dead or has left ({address.host}:{address.port}: {error})", has_left=True)

        return dict(zip(addresses, _at_once(ask_one, addresses.values()), strict=True))

    def tell(self, addresses: Mapping[int, SentinelAddress], verdict: Verdict, timeout_s: float) -> None:
        """Tell ranks a verdict, all at once; those that cannot be reached are passed over."""

        def tell_one(address: SentinelAddress) -> None:
            try:
                self._request(address, {"tell": asdict(verdict)}, timeout_s)
            except (OSError, ValueError):
                pass

        _at_once(tell_one, addresses.values())

    def close(self) -> None:
        """Stop listening."""
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the server, which else looks up every half second
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Answer one request, or ``None`` for one without the secret."""
        if not hmac.compare_digest(str(request.get("secret", "")), self._secret):
            return None
        if "tell" in request:
            told = request["tell"]
            if self.verdict is None:
                self.verdict = Verdict(tuple(told["peers"]), told["reason"], told["found_by"], told["has_left"])
            return {}
        return asdict(self.status)

    def _request(self, address: SentinelAddress, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
            line = json.dumps({**request, "secret": self._secret}) + "\n"
            connection.sendall(line.encode())
            with connection.makefile("rb") as replies:
                reply = replies.readline(_MAX_LINE_BYTES)
        answer: dict[str, Any] = json.loads(reply)
        return answer


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # all ranks may ask at once; the default of 5 would turn some away for a second

    def __init__(self, address: tuple[str, int], sentinel: Sentinel) -> None:
        self.sentinel = sentinel
        super().__init__(address, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = 10.0

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            request = json.loads(self.rfile.readline(_MAX_LINE_BYTES))
            answer = self.server.sentinel.answer(request)
            if answer is not None:
                self.wfile.write((json.dumps(answer) + "\n").encode())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # a stranger's bytes, or an asker that has gone; either way nobody is owed an answer


def _at_once(function: Any, items: Iterable[Any]) -> list[Any]:
    items = list(items)
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        return list(pool.map(function, items))

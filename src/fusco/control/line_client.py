"""Send one line to many addresses at once and collect the answers, without threads: the process may have none left."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusco.control.line_server import MAX_LINE_BYTES

_MAX_CONNECTIONS = 256  # at a time
# Errors that keep this process from asking, and say nothing about the process that it asks.
_LOCAL_FAILURES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


def is_local_failure(error: Exception) -> bool:
    """Return whether a connection failed because this process has no descriptor, memory or port left."""
    return isinstance(error, OSError) and error.errno in _LOCAL_FAILURES


@dataclass
class _Request:
    index: int
    connection: socket.socket
    rest: bytes
    answer: bytearray = field(default_factory=bytearray)


def ask_all(addresses: Sequence[tuple[str, int]], line: bytes, timeout_s: float) -> list[bytes | OSError]:
    """Send a line, newline included, to all IPv4 addresses; return each one's answer, or the error that prevented it.

    ``timeout_s`` is the limit for all of them together: a ``TimeoutError`` for each that has not answered by then.
    """
    outcomes: list[bytes | OSError] = [TimeoutError(f"no answer within {timeout_s:.1f} s") for _ in addresses]
    waiting, deadline = deque(enumerate(addresses)), time.monotonic() + timeout_s
    with selectors.PollSelector() as poll:  # needs no descriptor
        under_way = poll.get_map()
        try:
            while waiting or under_way:
                _start_more(waiting, line, poll, outcomes)
                ready = poll.select(max(0.0, deadline - time.monotonic())) if under_way else []
                if under_way and not ready:
                    break
                for key, _ in ready:
                    _advance(key.data, poll, outcomes)
        finally:
            for key in list(under_way.values()):
                key.data.connection.close()
    return outcomes


def _start_more(
    waiting: deque[tuple[int, tuple[str, int]]],
    line: bytes,
    poll: selectors.BaseSelector,
    outcomes: list[bytes | OSError],
) -> None:
    """Connect to addresses until enough connections are under way; note the errors of those that fail at once."""
    while waiting and len(poll.get_map()) < _MAX_CONNECTIONS:
        index, address = waiting[0]
        started = _start(index, address, line)
        if isinstance(started, _Request):
            poll.register(started.connection, selectors.EVENT_WRITE, started)
        elif is_local_failure(started) and poll.get_map():
            return  # until a connection under way has closed
        else:
            outcomes[index] = started
        waiting.popleft()


def _advance(request: _Request, poll: selectors.BaseSelector, outcomes: list[bytes | OSError]) -> None:
    """Send or receive what is possible now; note the outcome and close the connection once there is one."""
    outcome = _outcome_of(request, poll)
    if outcome is not None:
        outcomes[request.index] = outcome
        poll.unregister(request.connection)
        request.connection.close()


def _start(index: int, address: tuple[str, int], line: bytes) -> _Request | OSError:
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return error
    connection.settimeout(0)
    result = connection.connect_ex(address)
    if result in (0, errno.EINPROGRESS):
        return _Request(index, connection, line)
    connection.close()
    return _error_of(result)


def _outcome_of(request: _Request, poll: selectors.BaseSelector) -> bytes | OSError | None:
    connection = request.connection
    try:
        if failure := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return _error_of(failure)
        with contextlib.suppress(BlockingIOError):
            if request.rest:
                request.rest = request.rest[connection.send(request.rest, socket.MSG_NOSIGNAL) :]
                if not request.rest:
                    poll.modify(connection, selectors.EVENT_READ, request)
                return None
            piece = connection.recv(MAX_LINE_BYTES)
            request.answer += piece
            if not piece or b"\n" in piece or len(request.answer) > MAX_LINE_BYTES:
                return bytes(request.answer)
    except OSError as error:
        return error
    return None


def _error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))

"""Steps of every collective, without gradients: validate, prepare, agree with all ranks, execute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.session import Session
from fusco.core.errors import RowOverflowError, SharedMemoryError, first_line
from fusco.core.profile import Call
from fusco.core.rows import require_movable_tensors
from fusco.engine.base import Engine, LateRejection, Pending, Request

RequestT = TypeVar("RequestT", bound=Request)
_Result = TypeVar("_Result")

_REFUSALS_IN_PREPARATION = (TypeError, ValueError, SharedMemoryError, RowOverflowError)


def run_collective(
    session: Session,
    engine: Engine[Any],
    name: str,
    validate: Callable[[], RequestT],
    prepare: Callable[[RequestT, Call], Pending[_Result]],
) -> _Result:
    """Validate, prepare, agree with all ranks, execute.

    Invalid input raises on its own rank and ``RejectedInputError`` on all others. The rank that rejects it takes part
    in the agreement only.

    ``validate`` returns a valid request, or raises: ``TypeError``, ``ValueError``, PyTorch's ``RuntimeError``, or what
    a caller's object raises when it is looked at. ``prepare`` is one of the engine's ``prepare_*``. Raises
    ``ThreadError`` in any thread but the session's owner, the error of an earlier asynchronous call, those of
    ``Session.agree``, and what ``validate``, ``prepare`` or the execution raises.
    """
    session.access.enter(name)
    try:
        request, rejection = _validated(session, engine, name, validate)
        try:  # a context made from a generator would take some microseconds
            call = session.begin(name)  # inside, as Ctrl-C may interrupt what follows at once
            begin = perf_counter()
            pending, rejection = (None, rejection) if request is None else _prepared(request, call, prepare)
            counts = _agreed(session, name, request, pending, rejection)
            call.profile.planning_s += perf_counter() - begin - call.profile.staging_s
            if pending is not None:
                result = pending.run(counts)
        except LateRejection as late:
            rejection = late.error
        except BaseException as error:
            session.leave(name, error)
            raise
        session.leave(name)
    finally:
        session.access.leave()
    if rejection is not None:
        raise rejection
    return result


def _validated(
    session: Session, engine: Engine[Any], name: str, validate: Callable[[], RequestT]
) -> tuple[RequestT | None, Exception | None]:
    """Return the valid request, or else the rejection: of the input, or for an earlier asynchronous call."""
    request: RequestT | None = None
    rejection: Exception | None = None
    try:
        require_movable_tensors(name)
        request = validate()
    except Exception as error:  # noqa: BLE001  raised again, once all ranks know
        rejection = error
    except BaseException as error:
        if session.has_published:  # other ranks count on this one
            session.fail(name, error)
        raise
    if not session.has_published and (earlier := engine.pending_error()):
        return None, earlier
    return request, rejection


def _prepared(
    request: RequestT, call: Call, prepare: Callable[[RequestT, Call], Pending[_Result]]
) -> tuple[Pending[_Result] | None, Exception | None]:
    """Return the prepared collective, or else the rejection of its input."""
    try:
        return prepare(request, call), None
    except _REFUSALS_IN_PREPARATION as error:
        return None, error


def _agreed(
    session: Session, name: str, request: Request | None, pending: Pending[Any] | None, rejection: Exception | None
) -> Sequence[tuple[int, ...]]:
    """Return the counts of all ranks. A rejection ends the session if this rank has published that there is none."""
    if rejection is not None:
        if session.has_published:
            raise rejection
        return session.agree(CollectiveFingerprint(name, rejection=first_line(rejection)))
    assert request is not None
    assert pending is not None
    known = request.known
    fingerprint = known.fingerprint if known else CollectiveFingerprint(name, request.fields)
    return session.agree(fingerprint, pending.counts, request.handle, pending.attachment)

"""Every collective without gradients: validated here, prepared by the engine, agreed upon by all ranks, executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.session import Session
from fusco.core.errors import SharedMemoryError
from fusco.core.movable import require_movable_tensors
from fusco.core.profile import Call
from fusco.engine.base import Engine, LateRejection, Pending


class Request(Protocol):
    """A valid request of one rank."""

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""


RequestT = TypeVar("RequestT", bound=Request)
_Result = TypeVar("_Result")

# PyTorch raises ``RuntimeError`` where it cannot look at an input.
REFUSALS = (TypeError, ValueError, RuntimeError)
_REFUSALS_IN_PREPARATION = (TypeError, ValueError, SharedMemoryError)


def run_collective(
    session: Session,
    engine: Engine[Any],
    name: str,
    validate: Callable[[], RequestT],
    prepare: Callable[[RequestT, Call], Pending[_Result]],
) -> _Result:
    """Validate, prepare, agree with all ranks, execute.

    A rank whose input is refused, at any of these steps, takes part just far enough for all others to learn of it.

    Args:
        session: of the communicator; only its owner thread gets past it.
        engine: says what went wrong with earlier calls.
        name: of the verb, as errors call it.
        validate: returns a valid request, or raises ``TypeError``, ``ValueError`` or ``RuntimeError``.
        prepare: one of the engine's ``prepare_*``.

    Raises:
        RejectedInputError, MismatchError: see ``Session.agree``. Otherwise what ``validate``, ``prepare`` or the
        execution raises.

    """
    rejection: Exception | None = None
    pending: Pending[_Result] | None = None
    with session.access.using(name):
        try:
            require_movable_tensors(name)
            request = validate()
        except REFUSALS as error:
            rejection = error
        rejection = engine.pending_error() or rejection
        with session.collective(name) as call:
            with call.profile.spend("planning"):
                if rejection is None:
                    try:
                        pending = prepare(request, call)
                    except _REFUSALS_IN_PREPARATION as error:
                        rejection = error
                fingerprint = CollectiveFingerprint(name, request.fields if pending else {}, str(rejection or ""))
                counts = session.agree(fingerprint, pending.counts if pending else ())
            if pending is not None:
                try:
                    return pending.run(counts)
                except LateRejection as late:
                    rejection = late.error
    assert rejection is not None
    raise rejection

"""Calls with inputs that were seen before, by what the engine has prepared for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

import torch

from fusco.api.handle import Dispatched, Handle, version_of
from fusco.api.known_inputs import KnownInput
from fusco.api.validation import Validator
from fusco.control.session import Session
from fusco.core.config import Launch, StaticRows
from fusco.core.movable import why_nothing_moves_here
from fusco.engine.base import LateRejection, Plan


class Repeats:
    """Repeated calls of one communicator.

    A call with a known input is prepared after it has been made with the same numbers of tokens on all ranks twice.
    From then on it is made here, as long as nothing but values and addresses changes. Whatever else is the case, the
    methods return ``None``, and ``run_collective`` must follow with the same input.
    """

    def __init__(self, session: Session, validator: Validator, *, is_enabled: bool) -> None:
        """``is_enabled`` is false for an engine that prepares nothing."""
        self._session, self._validator, self._is_enabled = session, validator, is_enabled

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        alignment: int,
        with_weights: bool,  # noqa: FBT001  as ``validate_dispatch``, by position
        static: StaticRows | None,
        launch: Launch | None,
    ) -> Dispatched | None:
        """Return the result of a dispatch, before autograd knows it."""
        find, known_by = self._validator.known_dispatch, (payloads, topk_idx, topk_weights, alignment, with_weights)
        sent: Dispatched | None
        sent = self._call("dispatch", find, known_by, None, payloads, topk_idx, topk_weights, static, launch)
        return sent

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None
    ) -> list[torch.Tensor] | None:
        """Return the rows of a dispatch along a handle, before autograd knows them."""
        rows: list[torch.Tensor] | None
        find, known_by = self._validator.known_redispatch, (payloads, handle)
        rows = self._call("dispatch_again", find, known_by, handle, payloads, launch)
        return rows

    def combine(
        self,
        verb: str,
        ys: Sequence[torch.Tensor],
        handle: Handle,
        weights: Literal["topk"] | None,
        launch: Launch | None,
    ) -> list[torch.Tensor] | None:
        """Return the sums of a combine of one tensor or several, before autograd knows them."""
        sums: list[torch.Tensor] | None
        sums = self._call(verb, self._validator.known_combine, (verb, ys, handle, weights), handle, ys, launch)
        return sums

    def _call(
        self,
        verb: str,
        find: Callable[..., KnownInput | None],
        known_by: tuple[Any, ...],
        handle: Handle | None,
        rows: Sequence[torch.Tensor],
        *rest: Any,
    ) -> Any:
        """Make a call along a handle, or a dispatch, which makes one; ``find`` finds what is known of its input.

        One function of many lines: a frame takes 0.1 us.
        """
        try:
            if not (known := self._is_enabled and find(*known_by)) or (repeated := known.repeated) is None:
                return None
        except Exception:  # noqa: BLE001  ``run_collective`` raises it, on all ranks
            return None
        number, session, rejection = 0, self._session, None
        if handle is not None:
            number, rest = handle.number, (handle.plan, *rest)
        session.access.enter(verb, is_for_owner=True)
        try:
            if why_nothing_moves_here() or (result := repeated.outputs(rows, *rest)) is None:
                return None
            begin = perf_counter()
            try:
                if not session.repeat(verb, repeated.record, number):
                    return None
                agreed, plan = perf_counter(), repeated.run(result, rows, *rest)
                if handle is None:
                    result = self._dispatched(plan, result, rest[1])
                    repeated.finish(plan, result.payloads, rest[0])
            except LateRejection as late:
                rejection = late.error
            except BaseException as error:
                session.leave(verb, error)
                raise
            session.leave_repeated(agreed - begin, perf_counter() - agreed, repeated.count)
        finally:
            session.access.leave()
        if rejection:
            raise rejection
        return result

    def _dispatched(self, plan: Plan, rows: Sequence[torch.Tensor], topk_weights: torch.Tensor | None) -> Dispatched:
        handle = Handle(plan, topk_weights, self._session.sequence_number, version_of(topk_weights))
        return Dispatched(tuple(rows), plan.num_rows_per_expert, None, handle)

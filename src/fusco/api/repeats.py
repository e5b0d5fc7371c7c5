"""Dispatch and combine of inputs that were seen before, by what the engine has prepared for them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal, cast

import torch

from fusco.api.handle import Dispatched, Handle, version_of
from fusco.api.validation import Validator
from fusco.control.session import Session
from fusco.core.config import Launch, StaticRows
from fusco.core.movable import why_nothing_moves_here


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
        if not self._is_enabled:
            return None
        known = self._validator.known_dispatch(payloads, topk_idx, topk_weights, alignment, with_weights)
        if known is None or (repeated := known.repeated) is None:
            return None
        session = self._session
        session.access.enter("dispatch", is_for_owner=True)
        try:
            if why_nothing_moves_here() or (outputs := repeated.outputs(payloads, static, launch)) is None:
                return None
            begin = perf_counter()
            try:
                if not session.repeat("dispatch", repeated.record, 0):
                    return None
                agreed = perf_counter()
                plan = repeated.run(payloads, topk_idx, topk_weights, outputs)
                handle = Handle(plan, topk_weights, session.sequence_number, version_of(topk_weights))
                sent = Dispatched(tuple(outputs), plan.num_rows_per_expert, None, handle)
                rejection = repeated.finish(plan, outputs, topk_idx)
            except BaseException as error:
                session.leave("dispatch", error)
                raise
            session.leave_repeated(agreed - begin, perf_counter() - agreed, repeated.count)
        finally:
            session.access.leave()
        if rejection:
            raise rejection
        return sent

    def combine(
        self, y: torch.Tensor, handle: Handle, weights: Literal["topk"] | None, launch: Any
    ) -> torch.Tensor | None:
        """Return the result of a combine, before autograd knows it."""
        if not self._is_enabled:
            return None
        try:
            known = self._validator.known_combine(y, handle, weights)
        except (TypeError, ValueError):
            return None
        if known is None or (repeated := known.repeated) is None:
            return None
        session = self._session
        session.access.enter("combine", is_for_owner=True)
        try:
            if why_nothing_moves_here() or (out := repeated.output(y, handle.plan, launch)) is None:
                return None
            begin = perf_counter()
            try:
                if not session.repeat("combine", repeated.record, handle.number):
                    return None
                agreed = perf_counter()
                repeated.run(y, handle.plan, out)
            except BaseException as error:
                session.leave("combine", error)
                raise
            session.leave_repeated(agreed - begin, perf_counter() - agreed, repeated.count)
        finally:
            session.access.leave()
        return cast("torch.Tensor", out)

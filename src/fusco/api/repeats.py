"""Dispatch and combine of inputs that were seen before, by what the engine has prepared for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch

from fusco.api.handle import Handle
from fusco.api.validation import DispatchOptions, Validator
from fusco.control.session import Session
from fusco.core.movable import why_nothing_moves_here
from fusco.engine.base import DispatchOutput, LateRejection

_Result = TypeVar("_Result")


class Repeats:
    """Repeated calls of one communicator.

    A call with a known input is prepared after it has been made with the same numbers of tokens on all ranks twice.
    From then on it is made here, as long as nothing but values and addresses changes. Whatever else is the case, the
    methods return ``None``, and ``run_collective`` must follow with the same input.
    """

    def __init__(self, session: Session, validator: Validator) -> None:
        self._session, self._validator = session, validator

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> DispatchOutput[Any] | None:
        """Return what ``Engine.prepare_dispatch`` does when it is run."""
        known = self._validator.known_dispatch(payloads, topk_idx, topk_weights, options)
        if known is None or known.repeated is None:
            return None
        repeated = known.repeated
        access = self._session.access
        access.enter("dispatch", is_for_owner=True)
        try:
            if why_nothing_moves_here():
                return None
            outputs = repeated.outputs(payloads, options.static, options.launch)
            if outputs is None:
                return None
            return self._make("dispatch", repeated, 0, lambda: repeated.run(payloads, topk_idx, topk_weights, outputs))
        finally:
            access.leave()

    def combine(
        self, y: torch.Tensor, handle: Handle, weights: Literal["topk"] | None, launch: Any
    ) -> torch.Tensor | None:
        """Return what ``Engine.prepare_combine`` does when it is run."""
        try:
            known = self._validator.known_combine(y, handle, weights)
        except (TypeError, ValueError):
            return None
        if known is None or known.repeated is None:
            return None
        repeated = known.repeated
        access = self._session.access
        access.enter("combine", is_for_owner=True)
        try:
            if why_nothing_moves_here():
                return None
            out: torch.Tensor | None = repeated.output(y, handle.plan, launch)
            if out is None:
                return None

            def run() -> torch.Tensor:
                repeated.run(y, handle.plan, out)
                return out

            return self._make("combine", repeated, handle.number, run)
        finally:
            access.leave()

    def _make(self, operation: str, repeated: Any, handle: int, run: Callable[[], _Result]) -> _Result | None:
        session, begin = self._session, perf_counter()
        rejection: Exception | None = None
        result: _Result | None = None
        try:
            if not session.repeat(operation, repeated.record, handle):
                return None
            agreed = perf_counter()
            try:
                result = run()
            except LateRejection as late:
                rejection = late.error
        except BaseException as error:
            session.leave(operation, error)
            raise
        session.leave(operation)
        profile = session.profile
        profile.planning_s, profile.wire_s, profile.num_sms = agreed - begin, perf_counter() - agreed, repeated.num_sms
        if rejection:
            raise rejection
        return result

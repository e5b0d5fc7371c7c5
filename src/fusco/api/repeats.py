"""Calls with inputs that were seen before, by what the engine has prepared for them."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Literal

import torch

from fusco.api.handle import Dispatched, Handle, version_of
from fusco.api.known_inputs import KnownInput
from fusco.api.validation import Validator
from fusco.control.session import Session
from fusco.core.config import Launch, StaticRows
from fusco.engine.base import LateRejection, Plan
from fusco.engine.quantizer import Origin


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
        origin: Origin | None = None,
    ) -> Dispatched | None:
        """Return the result of a dispatch, before autograd knows it."""
        if not self._is_enabled:
            return None
        try:
            known = self._validator.known_dispatch(payloads, topk_idx, topk_weights, alignment, with_weights, origin)
        except Exception:  # noqa: BLE001  ``run_collective`` raises it, on all ranks
            return None
        return self._call("dispatch", known, 0, payloads, (topk_idx, topk_weights, static), launch)

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None, origin: Origin | None = None
    ) -> list[torch.Tensor] | None:
        """Return the rows of a dispatch along a handle, before autograd knows them."""
        if not self._is_enabled:
            return None
        try:
            known = self._validator.known_redispatch(payloads, handle, origin)
        except Exception:  # noqa: BLE001  as above
            return None
        return self._call("dispatch_again", known, handle.number, payloads, handle.plan, launch)

    def combine(
        self,
        verb: str,
        ys: Sequence[torch.Tensor],
        handle: Handle,
        weights: Literal["topk"] | None,
        launch: Launch | None,
    ) -> list[torch.Tensor] | None:
        """Return the sums of a combine of one tensor or several, before autograd knows them."""
        if not self._is_enabled:
            return None
        try:
            known = self._validator.known_combine(verb, ys, handle, weights)
        except Exception:  # noqa: BLE001  as above
            return None
        return self._call(verb, known, handle.number, ys, handle.plan, launch)

    def _call(
        self,
        verb: str,
        known: KnownInput | None,
        handle: int,
        rows: Sequence[torch.Tensor],
        routed: Any,
        launch: Launch | None,
    ) -> Any:
        """Make a call of known input, if it is prepared.

        ``handle`` is the number of the handle that it is along, and ``routed`` its plan; a dispatch has 0, and its ids,
        weights and static rows, which are not unpacked before they are needed: that takes 0.1 us each time.
        """
        session, rejection = self._session, None
        if session.has_published:  # by a call that was interrupted before it went on
            with session.access.using(verb):
                session.end_interrupted()
        if known is None or (repeated := known.repeated) is None:
            return None
        session.access.enter(verb)
        try:
            if (result := repeated.outputs(rows, routed, launch)) is None:
                return None
            begin_s = monotonic()
            try:
                if not session.repeat(verb, repeated.record, handle):
                    return None
                agreed_s, plan = monotonic(), repeated.run(result, rows, routed)
                if not handle:
                    topk_idx, topk_weights, _ = routed
                    result = self._dispatched(plan, result, topk_weights)
                    repeated.finish(plan, result.payloads, topk_idx)
            except LateRejection as late:
                rejection = late.error
            except BaseException as error:
                session.leave(verb, error)
                raise
            session.leave_repeated(begin_s, agreed_s, repeated.count)
        finally:
            session.access.leave()
        if rejection:
            raise rejection
        return result

    def _dispatched(self, plan: Plan, rows: Sequence[torch.Tensor], topk_weights: torch.Tensor | None) -> Dispatched:
        handle = Handle(plan, topk_weights, self._session.sequence_number, version_of(topk_weights))
        return Dispatched(tuple(rows), plan.num_rows_per_expert, None, handle)

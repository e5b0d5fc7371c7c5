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
        find = self._validator.known_dispatch
        known = self._known(find, payloads, topk_idx, topk_weights, alignment, with_weights)
        sent: Dispatched | None
        sent = known and self._call("dispatch", known, 0, payloads, topk_idx, topk_weights, static, launch)
        return sent

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None
    ) -> list[torch.Tensor] | None:
        """Return the rows of a dispatch along a handle, before autograd knows them."""
        known = self._known(self._validator.known_redispatch, payloads, handle)
        rows: list[torch.Tensor] | None
        rows = known and self._call("dispatch_again", known, handle.number, payloads, handle.plan, launch)
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
        known = self._known(self._validator.known_combine, verb, ys, handle, weights)
        sums: list[torch.Tensor] | None
        sums = known and self._call(verb, known, handle.number, ys, handle.plan, launch)
        return sums

    def _known(self, find: Callable[..., KnownInput | None], *arguments: Any) -> Any:
        """Return what is prepared for an input along a handle."""
        if not self._is_enabled:
            return None
        try:
            known = find(*arguments)
        except Exception:  # noqa: BLE001  ``run_collective`` raises it, on all ranks
            return None
        return known and known.repeated

    def _call(self, verb: str, repeated: Any, handle: int, *arguments: Any) -> Any:
        """Make a repeated call along a handle of this number; 0 for a dispatch, which makes one."""
        session, rejection = self._session, None
        session.access.enter(verb, is_for_owner=True)
        try:
            if why_nothing_moves_here() or (result := repeated.outputs(*arguments)) is None:
                return None
            begin = perf_counter()
            try:
                if not session.repeat(verb, repeated.record, handle):
                    return None
                agreed = perf_counter()
                plan = repeated.run(result, *arguments)
                if not handle:
                    result = self._dispatched(repeated, plan, result, *arguments)
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

    def _dispatched(
        self,
        repeated: Any,
        plan: Plan,
        outputs: list[torch.Tensor],
        _payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *_: Any,
    ) -> Dispatched:
        """Make the result of a dispatch while the device works, and finish it."""
        handle = Handle(plan, topk_weights, self._session.sequence_number, version_of(topk_weights))
        sent = Dispatched(tuple(outputs), plan.num_rows_per_expert, None, handle)
        repeated.finish(plan, outputs, topk_idx)
        return sent

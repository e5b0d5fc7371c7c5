"""Room of a communicator that grows: when a dispatch does not fit on one rank, all ranks make a larger size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from fusco.api.collective import run_collective
from fusco.api.create import CommunicatorConfig, CommunicatorParts, create
from fusco.api.handle import Dispatched, Handle, version_of
from fusco.api.membership import Membership, release
from fusco.api.repeats import Repeats
from fusco.api.validation import Validator
from fusco.control.fingerprint import GROWTH, CollectiveFingerprint
from fusco.core.balance import Balance
from fusco.core.config import Capacity, Launch, StaticRows
from fusco.core.errors import ClosedError, GrowthError
from fusco.engine.base import DispatchOutput
from fusco.engine.quantizer import Origin

_Result = TypeVar("_Result")


class Growing(Membership):
    """The part of a ``Communicator`` that gives its dispatches room.

    Handles of earlier sizes stay valid, so these stay, too: numbers of tokens double, and all of them together
    take at most twice the last one's memory. A call along such a handle is agreed on in the latest size first, so
    ranks that are out of step never wait for each other in two of them.
    """

    def _join(self, parts: CommunicatorParts) -> None:
        super()._join(parts)
        self._repeats = Repeats(parts.session, parts.validator, is_enabled=parts.engine.is_asynchronous)

    def fitting(
        self, need: Capacity, dispatch: Callable[[], _Result], make_room: Callable[[Capacity], object] | None = None
    ) -> _Result:
        """Return ``dispatch()`` once there is room for what it needs on each rank: a collective, for adapters.

        ``dispatch`` calls ``dispatch`` of this communicator and no other collective; it is called again if another
        rank needs more room. Raises what it raises, and ``ValueError`` if this communicator cannot grow. ``make_room``
        is called with ``need`` on all ranks, in place of making a larger size.
        """
        batch = self._owners.batch
        while True:
            with suppress(GrowthError):
                if self.capacity.holds(need) or self._validator.is_capturing:  # which refuses what does not fit
                    return dispatch()
                self.agree(GROWTH)
            (make_room or self._make_room)(need)
            self._owners.batch = batch  # is of the next dispatch, which is this one

    def room_of_all(self, need: Capacity) -> Capacity:
        """Return what all ranks need together, in powers of two of tokens: a collective, for adapters."""
        needs = self._agree(CollectiveFingerprint("room for a larger dispatch"), list(vars(need).values()))
        of_ranks = [Capacity(**dict(zip(vars(need), each, strict=True))) for each in needs]
        return reduce(Capacity.union, of_ranks, self.capacity).with_reserve()

    @property
    def capacity(self) -> Capacity:
        """The sizes that there is memory for on each rank."""
        return self._validator.capacity

    def _send(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        alignment: int,
        with_weights: bool,  # noqa: FBT001  as ``validate_dispatch``, by position
        static: StaticRows | None,
        launch: Launch | None,
        origin: Origin | None,
    ) -> Dispatched:
        """``dispatch`` without gradients."""
        if self._owners.are_chosen:
            topk_idx = self._owners.choose(topk_idx)
        if sent := self._repeats.dispatch(
            payloads, topk_idx, topk_weights, alignment, with_weights, static, launch, origin
        ):
            return sent
        routed = payloads, topk_idx, topk_weights
        validate = partial(self._validator.validate_dispatch, *routed, alignment, with_weights, static, launch, origin)
        output = run_collective(self._session, self._engine, "dispatch", validate, self._engine.prepare_dispatch)
        return self._dispatched(output, topk_weights)

    def _send_balanced(
        self, balance: Balance, payloads: Sequence[torch.Tensor], topk_idx: torch.Tensor, *others: Any
    ) -> Dispatched:
        """``_send`` as the plan of its batch says."""
        if not self._owners.plans_within_dispatch():
            plan = self._owners.plan_batch(topk_idx, balance)
            return replace(self._send(payloads, topk_idx, *others), batch_plan=plan)
        chosen = self._owners.choose(topk_idx) if self._owners.are_chosen else topk_idx
        validate = partial(self._validator.validate_dispatch, payloads, chosen, *others)
        plan, output = self._owners.planned_dispatch(topk_idx, balance, validate)
        sent = self._dispatched(output, others[0]) if output else self._send(payloads, topk_idx, *others)
        return replace(sent, batch_plan=plan)

    def _dispatched(self, output: DispatchOutput[Any], topk_weights: torch.Tensor | None) -> Dispatched:
        plan, rows = output.plan, tuple(output.rows)
        handle = Handle(plan, topk_weights, self._session.sequence_number, version_of(topk_weights))
        return Dispatched(rows, plan.num_rows_per_expert, output.weights, handle, output.event)

    def _with_room(
        self, send: Callable[..., Dispatched], payloads: Sequence[torch.Tensor], topk_idx: torch.Tensor, *others: Any
    ) -> Dispatched:
        """Call ``send`` with any number of tokens."""
        is_tensor = isinstance(topk_idx, torch.Tensor) and topk_idx.ndim > 0
        need = replace(self.capacity, max_tokens_per_rank=max(len(topk_idx), 1) if is_tensor else 1)
        return self.fitting(need, partial(send, payloads, topk_idx, *others))

    def _move_again(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None, origin: Origin | None = None
    ) -> list[torch.Tensor]:
        """``dispatch_again`` without gradients."""
        if self._earlier and (earlier := self._earlier_of(handle)):
            return self._in_turn(earlier, "dispatch_again", "_move_again", payloads, handle, launch, origin)
        if (rows := self._repeats.dispatch_again(payloads, handle, launch, origin)) is not None:
            return rows
        validate = partial(self._validator.validate_redispatch, payloads, handle, launch, origin)
        return run_collective(self._session, self._engine, "dispatch_again", validate, self._engine.prepare_redispatch)

    def _sum(
        self,
        verb: str,
        ys: Sequence[torch.Tensor],
        handle: Handle,
        weights: Literal["topk"] | None,
        launch: Launch | None,
    ) -> list[torch.Tensor]:
        """``combine`` or ``combine_all`` without gradients."""
        if self._earlier and (earlier := self._earlier_of(handle)):
            return self._in_turn(earlier, verb, "_sum", verb, ys, handle, weights, launch)
        if (sums := self._repeats.combine(verb, ys, handle, weights, launch)) is not None:
            return sums
        validate = partial(self._validator.validate_combine, verb, ys, handle, weights, launch)
        return run_collective(self._session, self._engine, verb, validate, self._engine.prepare_combine)

    def _make_room(self, need: Capacity) -> None:
        """Make a size that is large enough for all ranks; a collective."""
        with self.rejecting():
            config, group = self._require_growth()
        room = self.room_of_all(need)
        if self.placement is not self._validator.caller_placement:  # after ``place``
            config = replace(config, expert_placement=self.placement)
        parts = create(group, replace(config, room=room), self._session.access)
        if self._is_closed:  # by a signal handler, meanwhile
            release(parts.session, parts.engine)
            raise ClosedError("dispatch was interrupted: the communicator is closed")
        if self._limits:
            limits, limit_s = self._limits
            limits.enter_context(parts.session.limited(limit_s))
        self._engine.wait()  # calls run in the order of their launches, of all sizes
        self._finalizer.detach()
        of_parts: Callable[[CommunicatorParts], Membership] = type(self).of_parts  # type: ignore[attr-defined]
        sizes = (*self._earlier, of_parts(CommunicatorParts(self._session, self._engine, self._validator)))
        sizes[-1]._session.hooks = self._hooks  # noqa: SLF001  of this class
        self._join(parts)
        self._earlier = sizes

    def _require_growth(self) -> tuple[CommunicatorConfig, dist.ProcessGroup]:
        """Return what the next size is made of; ``ValueError`` if there cannot be one."""
        self._validator.require_not_capturing("a dispatch that makes room")
        group = self._group() if self._group else None
        if self._validator.members:
            raise ValueError("there is no room for this dispatch, and sizes are fixed once members have changed")
        if self._config is None or group is None:
            raise ValueError("there is no room for this dispatch, and no process group to make more with")
        return self._config, group

    def _earlier_of(self, handle: Handle | None) -> Membership | None:
        """Return the earlier size that a handle is of, or ``None``."""
        if self._earlier and isinstance(handle, Handle):
            for each in self._earlier:
                if handle.plan.placement is each._validator.placement:  # noqa: SLF001  of this class
                    return each
        return None

    def _validator_of(self, handle: Handle | None) -> Validator:
        return (self._earlier_of(handle) or self)._validator  # noqa: SLF001  of this class

    def _in_turn(self, earlier: Membership, verb: str, name: str, *arguments: Any) -> list[torch.Tensor]:
        """Call a method of an earlier size, after agreeing on it, and in order among the calls of the others."""
        number, room = self._earlier.index(earlier), earlier._validator.capacity  # noqa: SLF001  of this class
        self.agree(f"{verb} along a handle of {room.max_tokens_per_rank} tokens, size {number}")
        self._along = earlier._session, self._session.sequence_number  # noqa: SLF001  of this class
        self._engine.wait()
        result: list[torch.Tensor] = getattr(earlier, name)(*arguments)
        earlier._engine.wait()  # noqa: SLF001
        return result

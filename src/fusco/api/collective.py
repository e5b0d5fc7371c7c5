"""Every collective without gradients: checked here, agreed upon by all ranks, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from fusco.api.handle import Handle
from fusco.api.validation import Checks, wants_grad
from fusco.control.fingerprint import Agreement, Terms
from fusco.core.access import Access
from fusco.core.integers import MAX_INT32, check_integer
from fusco.core.launch import Launch, StaticSlots
from fusco.core.rows import describe_rows
from fusco.core.segments import Segments
from fusco.engine.base import Delivery, DispatchOrder, Engine, ExchangeOrder
from fusco.planner.balancer import Balancer
from fusco.planner.routing import Routing
from fusco.schedule.schedule import ScheduleMode

_Checked = TypeVar("_Checked")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How a dispatch lays rows out; see ``Communicator.dispatch``."""

    expert_alignment: int = 1
    with_weights: bool = False
    static: StaticSlots | None = None
    launch: Launch | None = None


@dataclass(frozen=True)
class CheckedEngine:
    """An engine, and what its communicator accepts. A rank's bad input is its error, and all others learn of it."""

    engine: Engine
    checks: Checks
    balancer: Balancer
    access: Access

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Delivery:
        """Plan and move rows."""

        def check() -> Routing:
            self.checks.launching("dispatch", self.engine.topology.num_nodes)
            check_integer("expert_alignment", options.expert_alignment, least=1, most=MAX_INT32)
            self.checks.sizing(options.static)
            if options.with_weights and topk_weights is None:
                raise ValueError("with_weights=True needs topk_weights")
            routing = Routing(topk_idx, topk_weights)
            self.checks.routing(routing)
            self.checks.payloads(payloads, routing.num_tokens)
            if topk_weights is not None and topk_weights.dtype != torch.float64:
                routing = Routing(topk_idx, topk_weights.detach().float())
            return routing

        def terms() -> Terms:
            return {
                "payloads": list(map(describe_rows, payloads)),
                "num_topk": topk_idx.shape[1],
                "topk_weights": "none" if topk_weights is None else str(topk_weights.dtype),
                "requires_grad": str([wants_grad(payloads[0]), wants_grad(topk_weights), options.with_weights]),
            }

        def work(agreement: Agreement, routing: Routing | None) -> Delivery | None:
            if routing is None:
                return self.engine.dispatch(agreement, None)
            order = DispatchOrder(
                routing=routing,
                payloads=payloads,
                placement=self.checks.placement,
                balancer=self.balancer,
                expert_alignment=options.expert_alignment,
                static=options.static,
                launch=options.launch or Launch(),
            )
            return self.engine.dispatch(agreement, order)

        return self.collective("dispatch", check, terms, work)

    def dispatch_along(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None = None
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""

        def check() -> None:
            self.checks.launching("dispatch_again", self.engine.topology.num_nodes)
            self.checks.handle(handle)
            self.checks.payloads(payloads, handle.num_tokens)

        def terms() -> Terms:
            grad = str(wants_grad(payloads[0]))
            return {"payloads": list(map(describe_rows, payloads)), "handle": handle.number, "requires_grad": grad}

        def work(agreement: Agreement, _: None) -> list[torch.Tensor] | None:
            plan = None if agreement.rejection else handle.plan
            return self.engine.dispatch_along(agreement, plan, payloads, launch or Launch())

        return self.collective("dispatch_again", check, terms, work)

    def combine(self, y: torch.Tensor, handle: Handle, launch: Launch | None = None) -> torch.Tensor:
        """Sum rows."""

        def check() -> None:
            self.checks.launching("combine", self.engine.topology.num_nodes)
            self.checks.rows(y, handle)

        def terms() -> Terms:
            return {
                "row": describe_rows(y),
                "handle": handle.number,
                "is_weighted": str(handle.is_weighted),
                "requires_grad": str([wants_grad(y), wants_grad(handle.topk_weights)]),
            }

        def work(agreement: Agreement, _: None) -> torch.Tensor | None:
            plan, weights = (None, None) if agreement.rejection else (handle.plan, handle.weights)
            return self.engine.combine(agreement, plan, y, weights, launch or Launch())

        return self.collective("combine", check, terms, work)

    def shuffle(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Exchange scattered segments."""

        def check() -> None:
            self.checks.waiting("shuffle")
            self.checks.partners(send, receive)

        def work(agreement: Agreement, _: None) -> None:
            is_refused = bool(agreement.rejection)
            self.engine.shuffle(agreement, {} if is_refused else send, {} if is_refused else receive)

        self.collective("shuffle", check, dict, work)

    def all_to_all(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        mode: ScheduleMode | None,
    ) -> ExchangeOrder:
        """Exchange rows; ``splits`` are those of the output, then those of the input. Returns what was exchanged."""

        def check() -> ExchangeOrder:
            self.checks.waiting("all_to_all")
            return self.checks.exchange(output, input_, splits, mode)

        def terms() -> Terms:
            return {"rows": describe_rows(input_), "schedule": str(mode), "requires_grad": str(wants_grad(input_))}

        def work(agreement: Agreement, order: ExchangeOrder | None) -> ExchangeOrder | None:
            self.engine.all_to_all(agreement, order)
            return order

        return self.collective("all_to_all", check, terms, work)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that peers can read."""

        def check() -> tuple[int, ...]:
            self.checks.waiting("empty")
            return self.checks.shape(shape, dtype)

        def terms() -> Terms:
            return {"shape": str(tuple(shape)), "dtype": str(dtype)}

        def work(agreement: Agreement, checked: tuple[int, ...] | None) -> torch.Tensor | None:
            return self.engine.empty(agreement, *((), torch.uint8) if checked is None else (checked, dtype))

        return self.collective("empty", check, terms, work)

    def collective(
        self,
        operation: str,
        check: Callable[[], _Checked],
        terms: Callable[[], Terms],
        work: Callable[[Agreement, _Checked | None], _Result | None],
    ) -> _Result:
        """Check, agree, work. A rank whose check fails takes part just far enough for the others to learn of it."""

        def check_all() -> _Checked:
            self.checks.surroundings(operation)
            return check()

        with self.access.using(operation):
            checked, rejection = attempt(check_all)
            rejection = self.engine.pending_error() or rejection
            agreement = Agreement(operation, {} if rejection else terms(), str(rejection or ""))
            with self.engine.collective(operation):
                result = work(agreement, checked)
        if rejection:
            raise rejection
        return cast("_Result", result)


def attempt(check: Callable[[], _Checked]) -> tuple[_Checked | None, Exception | None]:
    """What a check gives, or what it raises: about its input, or because PyTorch cannot look at it."""
    try:
        return check(), None
    except (TypeError, ValueError, RuntimeError) as error:
        return None, error

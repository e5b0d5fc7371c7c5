"""The contract between the public verbs and a backend: requests, what is prepared of them, and what comes of it.

A backend only moves bytes: what goes where is in the plan. Each collective is *prepared* by every rank by itself, then
all ranks *agree* (see ``fusco.api.collective``), then each *executes* what it has prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from fusco.control.fingerprint import Fields
from fusco.core.config import Launch, StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.core.rows import as_bytes, describe_rows, row_bytes, wants_grad
from fusco.core.segments import Segments
from fusco.core.timeline import NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.planner.balancer import Balancer
from fusco.planner.routing import Routing
from fusco.schedule.schedule import ScheduleMode


class Plan(Protocol):
    """What verbs, handles and gradients need to know of a backend's plan. Tensors are on the device of the rows."""

    @property
    def rank(self) -> int:
        """The rank whose plan it is."""

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank owns which expert."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""

    @property
    def num_topk(self) -> int:
        """Expert slots of a token."""

    @property
    def num_slots(self) -> int:
        """Rows of the expert-major output."""

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        """Rows of each local expert's block, padding not counted, int64 (num_local_experts,)."""

    @property
    def weights(self) -> torch.Tensor | None:
        """The weights that travelled with the routing, float32 or float64, in the backend's own order."""

    @property
    def slot_weights(self) -> torch.Tensor:
        """The same by slot (num_slots,); zero where no row stands."""

    @property
    def slot_to_k(self) -> torch.Tensor:
        """Which of its token's experts a slot's row is for, int64 (num_slots,); 0 where no row stands."""


PlanT = TypeVar("PlanT", bound=Plan)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """What one rank wants dispatched, validated.

    Attributes:
        routing: with weights as they travel.
        topk_weights: as the caller gave them.
        payloads: rows (num_tokens, ...) of each.
        placement: which rank owns which expert.
        balancer: chooses who forwards for whom.
        expert_alignment: every expert's block is padded to a multiple of this.
        with_weights: whether the weight of every row is wanted, too.
        static: a fixed size for the output, or ``None``.
        launch: how to use the device.

    """

    routing: Routing
    topk_weights: torch.Tensor | None = None
    payloads: Sequence[torch.Tensor]
    placement: ExpertPlacement
    balancer: Balancer
    expert_alignment: int
    with_weights: bool = False
    static: StaticRows | None
    launch: Launch

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""
        weights = self.topk_weights
        return {
            "payloads": list(map(describe_rows, self.payloads)),
            "num_topk": self.routing.num_topk,
            "topk_weights": "none" if weights is None else str(weights.dtype),
            "requires_grad": str([wants_grad(self.payloads[0]), wants_grad(weights), self.with_weights]),
        }


@dataclass(frozen=True)
class DispatchOutput(Generic[PlanT]):
    """Result of a dispatch.

    Attributes:
        plan: for combine and for other payloads.
        rows: expert-major rows of each payload.
        weights: the weight of each row (num_rows,), if requested.
        event: recorded after the dispatch's work, if the caller's stream does not wait for it.

    """

    plan: PlanT
    rows: list[torch.Tensor]
    weights: torch.Tensor | None = None
    event: torch.cuda.Event | None = None


def weights_of_rows(plan: Plan, request: DispatchRequest) -> torch.Tensor | None:
    """Return the weight of each row (num_rows,) in the dtype of the caller's weights, or ``None`` unless requested."""
    if not request.with_weights:
        return None
    assert request.topk_weights is not None
    return plan.slot_weights.to(request.topk_weights.dtype, copy=True)  # padding rows have weight zero


@dataclass(frozen=True, kw_only=True)
class RedispatchRequest(Generic[PlanT]):
    """Rows to be dispatched along an earlier plan; ``handle`` is the number of the collective that made it."""

    payloads: Sequence[torch.Tensor]
    plan: PlanT
    handle: int
    launch: Launch

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""
        return {
            "payloads": list(map(describe_rows, self.payloads)),
            "handle": self.handle,
            "requires_grad": str(wants_grad(self.payloads[0])),
        }


@dataclass(frozen=True, kw_only=True)
class CombineRequest(Generic[PlanT]):
    """Expert-major rows (num_slots, hidden) to be summed; ``handle`` is the number of the collective that planned it.

    ``topk_weights`` are the caller's, or ``None`` where all weights are one.
    """

    rows: torch.Tensor
    plan: PlanT
    topk_weights: torch.Tensor | None
    handle: int
    launch: Launch

    @property
    def is_weighted(self) -> bool:
        """Whether rows are multiplied by their weights."""
        return self.topk_weights is not None

    @property
    def weights(self) -> torch.Tensor | None:
        """The weights in the plan's order."""
        return self.plan.weights if self.is_weighted else None

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""
        return {
            "row": describe_rows(self.rows),
            "handle": self.handle,
            "is_weighted": str(self.is_weighted),
            "requires_grad": str([wants_grad(self.rows), wants_grad(self.topk_weights)]),
        }


@dataclass(frozen=True, kw_only=True)
class ShuffleRequest:
    """Segments to be exchanged: ``send[r]`` goes to rank ``r``, ``receive[r]`` comes from it; others have nothing."""

    send: Mapping[int, Segments]
    receive: Mapping[int, Segments]

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike: nothing but their sizes, which are counts."""
        return {}


@dataclass(frozen=True, kw_only=True)
class AllToAllRequest:
    """What one rank wants exchanged with all others, validated.

    Attributes:
        input: contiguous rows, by destination.
        output: contiguous rows, by source; they do not overlap ``input``.
        send_rows: how many go to each rank.
        receive_rows: how many come from each.
        mode: of the schedule between nodes; ``None`` leaves the choice to the engine.
        requires_grad: whether gradients will come back, by another exchange.

    """

    input: torch.Tensor
    output: torch.Tensor
    send_rows: Sequence[int]
    receive_rows: Sequence[int]
    mode: ScheduleMode | None = None
    requires_grad: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the same on all ranks."""
        return row_bytes(self.input)

    @property
    def memories(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of input and output, uint8 (num_bytes,)."""
        return as_bytes(self.input), as_bytes(self.output)

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""
        return {
            "rows": describe_rows(self.input),
            "schedule": str(self.mode),
            "requires_grad": str(self.requires_grad),
        }


@dataclass(frozen=True, kw_only=True)
class EmptyRequest:
    """Memory that peers can read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of it all."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def fields(self) -> Fields:
        """What all ranks must want alike."""
        return {"shape": str(self.shape), "dtype": str(self.dtype)}


@dataclass(frozen=True)
class Pending(Generic[ResultT]):
    """A collective that one rank has prepared.

    Attributes:
        counts: what this rank tells all others, packed; the same number of them on all ranks.
        run: executes it, once all ranks agree. Takes the counts of all ranks, by rank; may raise ``LateRejection``.

    """

    counts: Sequence[int]
    run: Callable[[Sequence[Sequence[int]]], ResultT]


class LateRejection(Exception):  # noqa: N818  no error of its own: it carries one
    """Input turned out to be bad in the middle of a collective, which all ranks have completed nevertheless.

    ``error`` is what the caller gets; the communicator lives on.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Engine(Protocol[PlanT]):
    """One rank's engine. All ranks call the same verbs in the same order, each within one collective of the session.

    Requests are valid. ``prepare_*`` may still raise ``TypeError`` or ``ValueError`` for what only shows there, and
    ``SharedMemoryError``: the collective is then called off on all ranks. What else fails in it, or in ``run``, ends
    the session. Every ``Pending`` is run right after its preparation, or never.
    """

    @property
    def topology(self) -> Topology:
        """Which ranks share a node."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether what a verb launched may be under way when it returns."""

    def pending_error(self) -> Exception | None:
        """What went wrong with this rank's earlier calls and shows only now; told once."""

    def prepare_dispatch(self, request: DispatchRequest, call: Call) -> Pending[DispatchOutput[PlanT]]:
        """Exchange routing, plan, and move token-major rows (num_tokens, ...) to expert-major ones (num_slots, ...)."""

    def prepare_redispatch(self, request: RedispatchRequest[PlanT], call: Call) -> Pending[list[torch.Tensor]]:
        """Move rows along an earlier plan."""

    def prepare_combine(self, request: CombineRequest[PlanT], call: Call) -> Pending[torch.Tensor]:
        """Sum expert-major rows (num_slots, hidden) into token-major rows (num_tokens, hidden)."""

    def prepare_shuffle(self, request: ShuffleRequest, call: Call) -> Pending[None]:
        """Exchange segments; ``MismatchError`` on all ranks unless they expect what others send."""

    def prepare_all_to_all(self, request: AllToAllRequest, call: Call) -> Pending[AllToAllRequest]:
        """Exchange rows among all ranks, by a schedule that is the same on all of them; ``MismatchError`` likewise.

        Returns the request, whose output is filled.
        """

    def prepare_empty(self, request: EmptyRequest, call: Call) -> Pending[torch.Tensor]:
        """Memory from which rows leave without being copied first; ``SharedMemoryError`` if there is not enough."""

    def gather_send(self, segments: Segments, dst: int) -> None:
        """Send segments to one rank, which calls ``scatter_recv``; not a collective."""

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """Receive into segments from one rank, which calls ``gather_send``; not a collective."""

    def wait(self) -> None:
        """Have the current stream wait for everything that was launched."""

    def synchronize(self) -> None:
        """Wait, within the limit, until everything that was launched is done."""

    def finish(self) -> None:
        """Give back what all ranks must give back together; all devices are done."""

    def has_finished(self) -> bool:
        """Whether all that was launched has been done as it should; waits for the own device, within the limit.

        Also once the session is broken: what a rank that failed had nothing to do with is complete.
        """

    def record(self, timeline: Timeline | NoTimeline) -> None:
        """Put what is launched from now on into a timeline; only where there is a device to time."""

    def abort(self) -> None:
        """Have every wait on the device end soon: this rank will not go on."""

    def close(self) -> None:
        """Give everything back, without waiting for anybody."""

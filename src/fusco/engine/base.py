"""Interface between the public verbs and a backend: requests, pending collectives, results.

A backend only moves bytes; the plan says which bytes go where. Every rank *prepares* a collective locally, then all
ranks *agree* (see ``fusco.api.collective``), then every rank *executes* what it has prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.record_round import Attachment
from fusco.core.config import Launch, StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.core.rows import as_bytes, describe_rows, expert_rows_shape, row_bytes, wants_grad
from fusco.core.segments import Segments
from fusco.core.timeline import NoTimeline, Timeline
from fusco.core.topology import ScheduleMode, Topology
from fusco.engine.owner_choice import OwnerChoice
from fusco.engine.quantizer import Origin, Quantizer
from fusco.planner.balancer import Balancer
from fusco.planner.routing import Routing


class Plan(Protocol):
    """The part of a backend's plan that verbs, handles and gradients use. Tensors are on the device of the rows."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def placement(self) -> ExpertPlacement:
        """Placement of the experts on ranks."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this rank."""

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""

    @property
    def num_slots(self) -> int:
        """Number of rows of the expert-major output."""

    @property
    def rows_per_expert(self) -> int | None:
        """Rows of each local expert in a masked output; ``None`` if blocks follow each other."""

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        """Rows of each local expert's block without padding, int64 (num_local_experts,)."""

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor | None:
        """The same in host memory; ``None`` if the host has not waited for the plan."""

    @property
    def num_rows_needed(self) -> torch.Tensor:
        """Rows that the output, or each expert of a masked one, would need to drop none: int32 (1,)."""

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        """Rows of each local expert that have no slot, int32 (num_local_experts,)."""

    @property
    def weights(self) -> torch.Tensor | None:
        """Weights that were sent with the routing, float32 or float64, in the order of the backend."""

    @property
    def slot_weights(self) -> torch.Tensor:
        """Weights by slot (num_slots,); zero in empty slots."""

    @property
    def slot_to_k(self) -> torch.Tensor:
        """Index k of each slot's row among the experts of its token, int64 (num_slots,); 0 in empty slots."""

    @property
    def slot_to_source(self) -> torch.Tensor:
        """Where each slot's row came from, int64 (num_slots, 2): the rank, and the number of the token.

        Tokens of another node's ranks are counted without those that no rank of this node has an expert for. Zero in
        empty slots. On CUDA the host may wait, so it is no part of a graph.
        """

    def replace_weights(self, of_slots: torch.Tensor) -> None:
        """Replace the weights that were sent with the routing, by others of the same dtype.

        ``of_slots`` has all weights of each slot's token (num_slots, num_topk); those of empty slots are not read.
        """


PlanT = TypeVar("PlanT", bound=Plan)
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class KnownCall:
    """Calls whose inputs differ in nothing but values and addresses from one that has been validated in full."""

    fingerprint: CollectiveFingerprint  # of all of them
    # what runs more of them, set by the engine; see ``fusco.api.repeats``
    repeated: Any = field(default=None, init=False)


@dataclass(kw_only=True)
class Request:
    """Validated input of a collective. Not to be changed; not frozen, as that makes objects three times as slowly."""

    # of earlier requests with the same ``fields``, if there were any
    known: KnownCall | None = field(default=None, repr=False, compare=False)
    handle: int = 0  # number of the collective that made the handle, equal on all ranks; 0 without one

    @property
    def fields(self) -> Fields:
        """Fields of the fingerprint: equal on all ranks."""
        return {}


@dataclass(kw_only=True)
class DispatchRequest(Request):
    """Validated dispatch of one rank."""

    routing: Routing  # ids, and weights in the dtype in which they are sent
    topk_weights: torch.Tensor | None = None  # the caller's weights
    payloads: Sequence[torch.Tensor]  # tensors of rows (num_tokens, ...)
    placement: ExpertPlacement  # which rank owns which expert
    balancer: Balancer  # chooses the forwarders
    expert_alignment: int  # every expert's block is padded to a multiple of this many rows
    with_weights: bool = False  # whether to return the weight of every row, too
    static: StaticRows | None  # fixed size of the output, or ``None``
    launch: Launch  # streams and SMs to use
    origin: Origin | None = None  # what the payloads are of, if a layer in front has made them of the caller's rows

    @property
    def fields(self) -> Fields:
        weights = self.topk_weights
        return {
            **({"quantize": self.origin.text} if self.origin else {}),
            "payloads": list(map(describe_rows, self.payloads)),
            "num_topk": self.routing.num_topk,
            "topk_weights": "none" if weights is None else str(weights.dtype),
            "requires_grad": str([wants_grad(self.payloads[0]), wants_grad(weights), self.with_weights]),
        }


@dataclass
class DispatchOutput(Generic[PlanT]):
    """Result of a dispatch."""

    plan: PlanT  # for combine and for other payloads
    rows: list[torch.Tensor]  # expert-major rows of each payload
    weights: torch.Tensor | None = None  # the weight of each row, if requested; see ``weights_of_rows``
    # recorded after the dispatch's work, if the caller's stream does not wait for it
    event: torch.cuda.Event | None = None


def weights_of_rows(plan: Plan, request: DispatchRequest) -> torch.Tensor | None:
    """Return the weight of each row, in the dtype of the caller's weights, or ``None`` unless requested.

    Their shape is that of the rows: (num_rows,), or (num_local_experts, rows_per_expert).
    """
    if not request.with_weights:
        return None
    assert request.topk_weights is not None
    weights = plan.slot_weights.view(expert_rows_shape(plan.num_slots, plan.rows_per_expert))
    return weights.to(request.topk_weights.dtype, copy=True)  # padding rows have weight zero


@dataclass(kw_only=True)
class RedispatchRequest(Request, Generic[PlanT]):
    """Dispatch of other rows with an earlier plan; ``handle`` is the number of the collective that made it."""

    payloads: Sequence[torch.Tensor]
    plan: PlanT
    launch: Launch
    origin: Origin | None = None  # as of a dispatch

    @property
    def fields(self) -> Fields:
        return {
            **({"quantize": self.origin.text} if self.origin else {}),
            "payloads": list(map(describe_rows, self.payloads)),
            "requires_grad": str(wants_grad(self.payloads[0])),
        }


@dataclass(kw_only=True)
class CombineRequest(Request, Generic[PlanT]):
    """Sums of tensors of expert-major rows (num_slots, hidden); ``handle`` is the number of the plan's collective.

    ``topk_weights`` are the caller's weights; ``None`` means that all weights are one.
    """

    rows: Sequence[torch.Tensor]  # one where an engine is not asynchronous
    plan: PlanT
    topk_weights: torch.Tensor | None
    launch: Launch

    @property
    def is_weighted(self) -> bool:
        """True if rows are multiplied by their weights."""
        return self.topk_weights is not None

    @property
    def weights(self) -> torch.Tensor | None:
        """Weights in the order of the plan."""
        return self.plan.weights if self.is_weighted else None

    @property
    def fields(self) -> Fields:
        return {
            "rows": ", ".join(map(describe_rows, self.rows)),
            "is_weighted": str(self.is_weighted),
            "requires_grad": str([*map(wants_grad, (*self.rows, self.topk_weights))]),
        }


@dataclass(kw_only=True)
class ShuffleRequest(Request):
    """Exchange of segments: ``send[r]`` goes to rank ``r``, ``receive[r]`` comes from it; missing ranks have none.

    Its fingerprint has no fields, as ``counts`` are compared. With ``has_lanes``, the same on all ranks, ranks of a
    node may send for each other.
    """

    send: Mapping[int, Segments]
    receive: Mapping[int, Segments]
    has_lanes: bool

    def counts(self, world_size: int) -> list[int]:
        """Return the bytes sent to each rank, then those received from each."""
        ranks = range(world_size)
        return [part[rank].total_bytes if rank in part else 0 for part in (self.send, self.receive) for rank in ranks]

    def of_rank(self, rank: int) -> list[dict[int, Segments]]:
        """Return what is sent to a rank, and what is received from it."""
        return [{rank: part[rank]} if rank in part else {} for part in (self.send, self.receive)]

    def of_others(self, rank: int) -> list[list[Segments]]:
        """Return what is sent to all ranks but one, and what is received from them, in order of rank."""
        return [[part[peer] for peer in sorted(part) if peer != rank] for part in (self.send, self.receive)]


@dataclass(kw_only=True)
class AllToAllRequest(Request):
    """Validated all-to-all of one rank.

    An input in pieces has nothing for this rank itself.
    """

    input: torch.Tensor  # contiguous rows, by destination
    output: torch.Tensor  # contiguous rows, by source; they do not overlap ``input``
    send_rows: Sequence[int]  # number of rows for each rank
    receive_rows: Sequence[int]  # number of rows from each rank
    pieces: Sequence[torch.Tensor] = ()  # contiguous, uint8: if any, they are the input in order, and ``input`` is not
    mode: ScheduleMode | None = None  # mode of the schedule between nodes; ``None`` lets the engine choose
    requires_grad: bool = False  # whether gradients will be sent back, by another all-to-all
    num_sms: int | None = None  # on CUDA, the most SMs of a kernel that copies; ``None`` means all
    # work for a host that would wait: each ``next`` does some, and is True if there was any. It may be left undone
    meanwhile: Iterator[bool] | None = None

    @property
    def counts(self) -> list[int]:
        """Rows sent to each rank, then those received from each."""
        return [*self.send_rows, *self.receive_rows]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the same on all ranks."""
        return row_bytes(self.input)

    @property
    def memories(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of input and output, uint8 (num_bytes,)."""
        return as_bytes(self.input), as_bytes(self.output)

    @property
    def fields(self) -> Fields:
        return {"rows": describe_rows(self.input), "schedule": str(self.mode), "requires_grad": str(self.requires_grad)}


@dataclass
class Pending(Generic[ResultT]):
    """Collective that one rank has prepared."""

    counts: Sequence[int]  # packed counts that this rank publishes; the same number of them on all ranks
    # executes the collective, once all ranks agree. Takes the counts of all ranks, by rank; may raise ``LateRejection``
    run: Callable[[Sequence[tuple[int, ...]]], ResultT]
    # data that goes to other nodes with the counts; or, if there are none, a function that returns it once all ranks of
    # the node agree
    attachment: Attachment | Callable[[], Attachment] | None = None


class LateRejection(Exception):  # noqa: N818  no error itself: it carries one
    """Input turned out to be invalid during a collective, which all ranks have completed nevertheless.

    ``error`` is raised to the caller. The communicator remains usable.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Engine(Protocol[PlanT]):
    """Engine of one rank. All ranks call the same verbs in the same order, each within one collective of the session.

    Requests are validated. ``prepare_*`` may still raise ``TypeError`` or ``ValueError`` for errors that only show
    there, and ``SharedMemoryError``: all ranks then cancel the collective. Any other failure in it or in ``run`` ends
    the session. Every ``Pending`` is run right after its preparation, or never.
    """

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""

    @property
    def is_asynchronous(self) -> bool:
        """True if launched work may still run when a verb returns."""

    def owner_choice(self) -> OwnerChoice:
        """Return a new choice of owners, which has no tables yet."""

    def quantizer(self) -> Quantizer:
        """Return what quantises rows."""

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier asynchronous call."""

    def prepare_dispatch(self, request: DispatchRequest, call: Call) -> Pending[DispatchOutput[PlanT]]:
        """Exchange routing, plan, and move token-major rows (num_tokens, ...) to expert-major ones.

        These have shape (num_slots, ...), or (num_local_experts, rows_per_expert, ...) if the plan is masked.
        """

    def prepare_redispatch(self, request: RedispatchRequest[PlanT], call: Call) -> Pending[list[torch.Tensor]]:
        """Move rows with an earlier plan."""

    def prepare_combine(self, request: CombineRequest[PlanT], call: Call) -> Pending[list[torch.Tensor]]:
        """Sum expert-major rows (num_slots, hidden) into token-major rows (num_tokens, hidden), of each tensor."""

    def prepare_shuffle(self, request: ShuffleRequest, call: Call) -> Pending[None]:
        """Exchange segments; ``MismatchError`` on all ranks if sizes of senders and receivers differ."""

    def prepare_all_to_all(self, request: AllToAllRequest, call: Call) -> Pending[AllToAllRequest]:
        """Exchange rows among all ranks by one schedule; ``MismatchError`` as in ``prepare_shuffle``.

        The result is the request with its output filled.
        """

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Return memory for what an all-to-all receives, uint8, uninitialised; on the CPU of earlier calls."""

    def stream(self, name: str, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Send segments to one rank, or receive segments from one; not a collective. ``name`` is for errors."""

    def wait(self) -> None:
        """Make the current stream wait for all launched work."""

    def synchronize(self) -> None:
        """Block, with a timeout, until all launched work is complete."""

    def stop_watching(self) -> None:
        """Expect other ranks to leave from now on: all work that this rank launched is complete."""

    def finish(self) -> None:
        """Free the resources that all ranks free together; all devices have finished."""

    def has_finished(self) -> bool:
        """Return True if all launched work completed without an error; waits for the local device, with a timeout.

        Also valid on a broken session: work that did not depend on the failed rank may have completed.
        """

    def record(self, timeline: Timeline | NoTimeline) -> None:
        """Record later calls in a timeline."""

    def num_live_graphs(self, *, are_deleted: bool = False) -> int:
        """Return how many CUDA graphs have captured calls and live; ``are_deleted`` waits a second for none to."""

    def keep_captured(self) -> Sequence[Any]:
        """Return what such graphs read, for the engine of the members that are left; ``close`` then leaves it alone."""

    def abort(self) -> None:
        """End all device-side waits soon: this rank will not continue."""

    def close(self) -> None:
        """Free all resources without waiting for peers."""

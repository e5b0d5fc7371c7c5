"""What the Communicator needs of a backend. A backend only moves bytes: what goes where is in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusco.control.fingerprint import Agreement
from fusco.core.launch import Launch, StaticSlots
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import as_bytes, row_bytes
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


@dataclass(frozen=True, kw_only=True)
class DispatchOrder:
    """What one rank wants dispatched, checked."""

    routing: Routing
    payloads: Sequence[torch.Tensor]
    placement: ExpertPlacement
    balancer: Balancer
    expert_alignment: int
    static: StaticSlots | None
    launch: Launch


@dataclass(frozen=True)
class Delivery:
    """What a dispatch gave.

    Attributes:
        plan: for combine and for other payloads.
        rows: expert-major rows of each payload.
        rejection: what turned out to be wrong with this rank's or another one's input after all; to be raised.

    """

    plan: Any
    rows: list[torch.Tensor]
    rejection: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class ExchangeOrder:
    """What one rank wants exchanged with all others, checked.

    Attributes:
        input: contiguous rows, by destination.
        output: contiguous rows, by source; they do not overlap ``input``.
        send_rows: how many go to each rank.
        receive_rows: how many come from each.
        mode: of the schedule between nodes; ``None`` leaves the choice to the engine.

    """

    input: torch.Tensor
    output: torch.Tensor
    send_rows: Sequence[int]
    receive_rows: Sequence[int]
    mode: ScheduleMode | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the same on all ranks."""
        return row_bytes(self.input)

    @property
    def memories(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of input and output, uint8 (num_bytes,)."""
        return as_bytes(self.input), as_bytes(self.output)


class Engine(Protocol):
    """One rank's engine. All ranks call the same verbs in the same order, each inside ``collective``.

    Every verb compares the ranks' agreements first: where they differ, all ranks raise ``MismatchError``; where one
    carries a rejection, all other ranks raise ``RejectedInputError`` and that rank gets ``None``, its other arguments
    not looked at.
    """

    @property
    def profile(self) -> CallProfile:
        """Times and bytes of the latest collective."""

    @property
    def topology(self) -> Topology:
        """Which ranks share a node."""

    @property
    def num_collectives(self) -> int:
        """How many collectives began on this engine; the same on all ranks inside one."""

    def collective(self, operation: str) -> AbstractContextManager[None]:
        """Everything a collective does happens inside this context; a failure inside it breaks the engine."""

    def pending_error(self) -> Exception | None:
        """What went wrong with this rank's earlier calls and shows only now; told once."""

    def agree(self, agreement: Agreement) -> None:
        """Compare agreements, and nothing else."""

    def dispatch(self, agreement: Agreement, order: DispatchOrder | None) -> Delivery | None:
        """Exchange routing, plan, and move token-major rows (num_tokens, ...) to expert-major ones (num_slots, ...)."""

    def dispatch_along(
        self, agreement: Agreement, plan: Any, payloads: Sequence[torch.Tensor], launch: Launch
    ) -> list[torch.Tensor] | None:
        """Move rows along an earlier plan."""

    def combine(
        self, agreement: Agreement, plan: Any, rows: torch.Tensor, weights: torch.Tensor | None, launch: Launch
    ) -> torch.Tensor | None:
        """Sum expert-major rows (num_slots, hidden) into token-major rows (num_tokens, hidden).

        ``weights`` are those of ``plan``, or ``None``: all are one then.
        """

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Send ``send[r]`` to every rank ``r`` and receive ``receive[r]`` from it; missing ranks have nothing."""

    def all_to_all(self, agreement: Agreement, exchange: ExchangeOrder | None) -> None:
        """Exchange rows among all ranks, by a schedule that is the same on all of them."""

    def gather_send(self, segments: Segments, dst: int) -> None:
        """Send segments to one rank, which calls ``scatter_recv``; not a collective."""

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """Receive into segments from one rank, which calls ``gather_send``; not a collective."""

    def empty(self, agreement: Agreement, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory from which rows leave without being copied first; ``SharedMemoryError`` if there is not enough."""

    def wait(self) -> None:
        """Have the current stream wait for everything that was launched."""

    def synchronize(self) -> None:
        """Wait, within the limit, until everything that was launched is done; ``ClosedError`` if nobody can say."""

    def settle(self) -> None:
        """The own device is done: meet all ranks once more, so that none takes away what another still needs."""

    def has_finished(self) -> bool:
        """Whether all that was launched has been done as it should; waits for the own device, within the limit.

        Also for an engine that is broken: what a rank that failed had nothing to do with is complete.
        """

    def record(self, timeline: Timeline | NoTimeline) -> None:
        """Put what is launched from now on into a timeline; only where there is a device to time."""

    def abandon(self, reason: str) -> None:
        """Tell all other ranks that this one will not come back, and refuse further calls."""

    def depart(self, reason: str) -> None:
        """Tell all other ranks that this one has left; only those raise that wait for it, now or later."""

    def close(self) -> None:
        """Give everything back, without waiting for anybody."""

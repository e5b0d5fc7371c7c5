"""What the Communicator needs of a backend. A backend only moves bytes: what goes where is in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fusco.balancer import Balancer
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement
from fusco.placement import ExpertPlacement
from fusco.planner.plan import DispatchPlan
from fusco.planner.routing import Routing
from fusco.segments import Segments
from fusco.topology import Topology


class Engine(Protocol):
    """One rank's engine. All ranks call the same verbs in the same order, each inside ``collective``.

    ``plan`` and ``agree`` compare the ranks' agreements first: where they differ, all ranks raise ``MismatchError``;
    where one carries a rejection, all other ranks raise ``RejectedInputError`` and that rank returns without a plan.
    """

    profile: CallProfile

    @property
    def topology(self) -> Topology:
        """Which ranks share a node."""

    @property
    def num_collectives(self) -> int:
        """How many collectives began on this engine; the same on all ranks inside one."""

    def collective(self, operation: str) -> AbstractContextManager[None]:
        """Everything a collective does happens inside this context; a failure inside it breaks the engine."""

    def plan(
        self,
        agreement: Agreement,
        routing: Routing,
        placement: ExpertPlacement,
        balancer: Balancer,
        expert_alignment: int,
    ) -> DispatchPlan | None:
        """Exchange routing and plan."""

    def agree(self, agreement: Agreement) -> None:
        """Compare agreements, for a collective that needs no new plan."""

    def dispatch_rows(self, plan: DispatchPlan, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move token-major rows (num_tokens, ...) to expert-major rows (num_slots, ...), each payload alike."""

    def combine_rows(self, plan: DispatchPlan, rows: torch.Tensor, pair_weights: torch.Tensor | None) -> torch.Tensor:
        """Sum expert-major rows (num_slots, hidden) into token-major rows (num_tokens, hidden).

        ``pair_weights[i]`` is the weight of the i-th pair of ``plan.distribution``; ``None`` means one.
        """

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Send ``send[r]`` to every rank ``r`` and receive ``receive[r]`` from it; missing ranks have nothing."""

    def gather_send(self, segments: Segments, dst: int) -> None:
        """Send segments to one rank, which calls ``scatter_recv``; not a collective."""

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """Receive into segments from one rank, which calls ``gather_send``; not a collective."""

    def abandon(self, reason: str) -> None:
        """Tell all other ranks that this one will not come back, and refuse further calls."""

    def close(self) -> None:
        """Give everything back, without waiting for anybody."""

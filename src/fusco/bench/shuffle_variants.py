"""The ways to shuffle that are compared, each made from its name; they share fusco's communicators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.baseline import BaselineShuffle
from fusco.bench.crossings import num_copies
from fusco.bench.no_engine import NoEngineShuffle
from fusco.bench.no_planner import NoPlannerShuffle, expand
from fusco.bench.shuffle_run import ShuffleRun
from fusco.bench.specification import WorldInput
from fusco.bench.traffic import Workload
from fusco.core.config import Launch, StaticRows
from fusco.core.profile import CallProfile
from fusco.planner.balancer import BALANCERS
from fusco.planner.routing import Routing

# How often a sum is rounded if parts of it travel from each node, and if they travel from each rank before.
_PARTS_OF_NODES, _PARTS_OF_RANKS = 2, 3
Sent = tuple[torch.Tensor, Any, Any]  # expert-major rows, rows of each local expert, what combine needs


@dataclass(frozen=True)
class Shuffle:
    """A way to shuffle.

    Attributes:
        dispatch: gives expert-major rows, rows of each local expert, and whatever ``combine`` needs.
        combine: gives token-major rows.
        profile: what the latest call of either cost.
        is_graph: whether it is to be captured in a CUDA graph and replayed.
        num_roundings: how often a sum of 16-bit rows may be rounded: where its parts travel, and at the end.

    """

    dispatch: Callable[[], Sent]
    combine: Callable[[torch.Tensor, Any], torch.Tensor]
    profile: Callable[[], CallProfile] = CallProfile
    is_graph: bool = False
    num_roundings: int = _PARTS_OF_NODES


class Ways:
    """Makes ways to shuffle on one rank; all ranks make the same ones in the same order. Use it in a ``with`` block.

    A communicator is opened when first needed, and serves all workloads of the run.
    """

    def __init__(self, group: dist.ProcessGroup, run: ShuffleRun) -> None:
        self._group, self._run, self._rank = group, run, dist.get_rank(group)
        self._launch = Launch(num_sms=run.num_sms)
        self._communicators: dict[tuple[str, int], Communicator] = {}
        self._visible: torch.Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Ways:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def make(self, variant: str, workload: Workload, world: WorldInput) -> Shuffle:
        """The way of this name, for this rank's part of the world's input."""
        x, ids, weights = (part[self._rank] for part in (world.rows, world.topk_idx, world.topk_weights))
        routing = Routing(ids, weights)
        if variant == "baseline":
            baseline = BaselineShuffle(self._group, workload.placement, workload.topology, x.device)
            return Shuffle(lambda: baseline.dispatch(x, ids, weights), baseline.combine, lambda: baseline.profile)
        if variant == "no-engine":
            explicit = NoEngineShuffle(
                self._group, workload.placement, workload.topology, BALANCERS[self._run.balancer]
            )
            return Shuffle(
                lambda: explicit.dispatch(x, ids, weights),
                explicit.combine,
                lambda: explicit.profile,
                num_roundings=_PARTS_OF_RANKS,
            )
        if variant == "no-planner":
            return self._no_planner(x, routing)
        comm = self.communicator("static" if variant == "no-balancer" else None)
        if variant in ("fusco", "no-balancer"):
            return self._fusco(comm, x, routing)
        assert variant in ("fusco-static", "fusco-graph", "fusco-in-place"), variant
        static = StaticRows(max(1, comm.dispatch(x, ids, weights).handle.num_rows))
        if variant == "fusco-in-place":
            x = self._in_place(comm, x)
        return self._fusco(comm, x, routing, static, is_graph=variant != "fusco-static")

    def communicator(self, balancer: str | None = None, max_tokens: int | None = None) -> Communicator:
        """One of fusco's, with the run's balancer and number of tokens unless others are given."""
        run, shape = self._run, self._run.shape
        key = (balancer or run.balancer, max_tokens or shape.tokens)
        if key not in self._communicators:
            comm = Communicator(
                self._group,
                num_experts=shape.placement.num_experts,
                num_topk=shape.num_topk,
                max_tokens_per_rank=key[1],
                max_bytes_per_token=shape.bytes_per_token,
                expert_placement=shape.placement.expert_to_rank,
                ranks_per_node=shape.topology.ranks_per_node,
                balancer=BALANCERS[key[0]],
                settings=run.settings,
                device=run.device,
            )
            self._communicators[key] = self._stack.enter_context(comm)
        return self._communicators[key]

    def _fusco(
        self,
        comm: Communicator,
        x: torch.Tensor,
        routing: Routing,
        static: StaticRows | None = None,
        *,
        is_graph: bool = False,
    ) -> Shuffle:
        return Shuffle(
            lambda: self._dispatch(comm, x, routing, static),
            lambda rows, handle: comm.combine(rows, handle, launch=self._launch),
            lambda: comm.profile,
            is_graph,
            # On CUDA parts of a sum travel between the ranks of a node, too.
            _PARTS_OF_RANKS if self._run.device == "cuda" and self._run.has_nodes else _PARTS_OF_NODES,
        )

    def _no_planner(self, x: torch.Tensor, routing: Routing) -> Shuffle:
        comm = self.communicator(max_tokens=self._most_copies)
        way = NoPlannerShuffle(
            lambda rows, expanded: self._dispatch(comm, rows, expanded),
            lambda rows, handle: comm.combine(rows, handle, launch=self._launch),
            x,
            expand(routing, self._run.shape.placement),
        )
        return Shuffle(way.dispatch, way.combine, lambda: comm.profile)

    @cached_property
    def _most_copies(self) -> int:
        """What a communicator without planner must have room for."""
        return max(1, *map(num_copies, self._run.workloads))

    def _dispatch(
        self, comm: Communicator, x: torch.Tensor, routing: Routing, static: StaticRows | None = None
    ) -> Sent:
        sent = comm.dispatch(x, routing.topk_idx, routing.topk_weights, static=static, launch=self._launch)
        return sent.rows, sent.num_rows_per_expert, sent.handle

    def _in_place(self, comm: Communicator, x: torch.Tensor) -> torch.Tensor:
        if self._visible is None:
            self._visible = comm.empty(x.shape, x.dtype)
        return self._visible.copy_(x)

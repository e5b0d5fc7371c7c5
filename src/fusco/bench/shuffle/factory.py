"""Variants that ``fusco bench shuffle`` compares, made on a rank by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.inputs.traffic import Workload, WorldInput
from fusco.bench.shuffle.baseline import BaselineShuffle
from fusco.bench.shuffle.no_engine import NoEngineShuffle, expand, sum_copies
from fusco.bench.shuffle.peers import BufferShuffle, ElasticBufferShuffle
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.summary import num_copies
from fusco.bench.shuffle.variants import WITHOUT_LANES, balancer_of, is_of_caller, load_of_caller
from fusco.core.config import Launch, StaticRows
from fusco.core.profile import CallProfile
from fusco.planner.balancer import BALANCERS
from fusco.planner.routing import Routing

Sent = tuple[torch.Tensor, Any, Any]  # expert-major rows, rows of each local expert, what combine needs

_Kept = TypeVar("_Kept")

# How often a sum is rounded if parts of it travel from each node, and if they travel from each rank before.
_PARTS_OF_NODES, _PARTS_OF_RANKS = 2, 3


@dataclass(frozen=True)
class Shuffle:
    """One variant on one rank."""

    dispatch: Callable[[], Sent]  # returns expert-major rows, rows of each local expert, and what ``combine`` needs
    combine: Callable[[torch.Tensor, Any], torch.Tensor]  # returns token-major rows
    profile: Callable[[], CallProfile] = CallProfile  # returns the profile of the latest call of either
    is_graph: bool = False  # whether it is captured in a CUDA graph and replayed
    # how often a sum of 16-bit rows may be rounded: where its parts travel, and at the end
    num_roundings: int = _PARTS_OF_NODES
    # whether the rows of an expert are in the order that is specified, and not in order of arrival
    is_ordered: bool = True

    def both(self) -> torch.Tensor:
        """Dispatch, then combine."""
        rows, _, handle = self.dispatch()
        return self.combine(rows, handle)


@dataclass(frozen=True)
class RankInput:
    """One rank's rows (num_tokens, hidden) and routing of a workload."""

    workload: Workload
    x: torch.Tensor
    routing: Routing


class ShuffleFactory(ExitStack):
    """Makes variants on one rank by name; all ranks make the same ones in the same order. Use it in a ``with`` block.

    A communicator is created when first needed, and serves all workloads of the run.
    """

    def __init__(self, group: dist.ProcessGroup, run: ShuffleRun) -> None:
        super().__init__()
        self.group, self.run = group, run
        self._launch = Launch(num_sms=run.num_sms)
        self._kept: dict[object, Any] = {}

    def make(self, variant: str, workload: Workload, world: WorldInput) -> Shuffle:
        """Return the variant of this name, on this rank's part of the input of all ranks."""
        rank = self.group.rank()
        routing = Routing(world.topk_idx[rank], world.topk_weights[rank])
        make = partial(_of_caller, name=variant) if is_of_caller(variant) else MAKERS[variant]
        return make(self, RankInput(workload, world.rows[rank], routing))

    def communicator(self, balancer: str | None = None, max_tokens: int | None = None) -> Communicator:
        """Return a communicator with the run's balancer and number of tokens, unless others are given."""
        run, shape = self.run, self.run.shape
        key = (balancer or run.balancer, max_tokens or shape.tokens)

        def make() -> Communicator:
            return Communicator(
                self.group,
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

        return self.keep(key, make)

    def keep(self, key: object, make: Callable[[], AbstractContextManager[_Kept]]) -> _Kept:
        """Return what ``make`` has made for the first workload that asked for this; it serves those that follow."""
        if key not in self._kept:
            self._kept[key] = self.enter_context(make())
        return self._kept[key]

    def by_communicator(
        self,
        comm: Communicator,
        x: torch.Tensor,
        routing: Routing,
        static: StaticRows | None = None,
        *,
        is_graph: bool = False,
    ) -> Shuffle:
        """Return dispatch and combine of a communicator, on the SMs that the run allows."""

        def dispatch() -> Sent:
            sent = comm.dispatch(x, routing.topk_idx, routing.topk_weights, static=static, launch=self._launch)
            return sent.rows, sent.num_rows_per_expert, sent.handle

        return Shuffle(
            dispatch,
            lambda rows, handle: comm.combine(rows, handle, launch=self._launch),
            lambda: comm.profile,
            is_graph,
            # On CUDA parts of a sum travel between the ranks of a node, too.
            _PARTS_OF_RANKS if self.run.device == "cuda" and self.run.has_nodes else _PARTS_OF_NODES,
        )


def _explicit(shuffle: Any, rank: RankInput, **traits: Any) -> Shuffle:
    """Return a variant whose ``dispatch`` is given rows and routing."""
    arguments = (rank.x, rank.routing.topk_idx, rank.routing.topk_weights)
    return Shuffle(
        lambda: shuffle.dispatch(*arguments),
        shuffle.combine,
        lambda: getattr(shuffle, "profile", CallProfile()),
        **traits,
    )


def _baseline(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    load = rank.workload
    return _explicit(BaselineShuffle(factory.group, load.placement, load.topology, rank.x.device), rank)


def _of_caller(factory: ShuffleFactory, rank: RankInput, name: str) -> Shuffle:
    """Return what the function ``name`` makes of a group, a placement, a topology and a device."""
    load = rank.workload
    shuffle = load_of_caller(name)(factory.group, load.placement, load.topology, rank.x.device)
    return _explicit(shuffle, rank, num_roundings=_PARTS_OF_RANKS)


def _no_engine(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    balancer = BALANCERS[balancer_of("no-engine", factory.run.balancer, factory.run.device)]
    shuffle = NoEngineShuffle(factory.group, rank.workload.placement, rank.workload.topology, balancer)
    return _explicit(shuffle, rank, num_roundings=_PARTS_OF_RANKS)


def _deep_ep(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    num_experts, num_sms = rank.workload.placement.num_experts, factory.run.num_sms
    return _explicit(factory.keep("deep_ep", lambda: BufferShuffle(factory.group, num_experts, num_sms)), rank)


def _deep_ep_v2(factory: ShuffleFactory, rank: RankInput, *, is_graph: bool = False) -> Shuffle:
    group, num_sms = factory.group, factory.run.num_sms
    buffer = factory.keep("deep_ep_v2", lambda: ElasticBufferShuffle(group, rank.workload, num_sms))
    # A product with a weight is rounded before parts of a sum are.
    exact = _explicit(buffer, rank, num_roundings=_PARTS_OF_RANKS, is_ordered=False)
    if not is_graph:
        return exact
    _, counts, _ = exact.dispatch()
    arguments = (rank.x, rank.routing.topk_idx, rank.routing.topk_weights, counts)
    return replace(exact, dispatch=lambda: buffer.dispatch(*arguments), is_graph=True)


def _no_planner(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    comm = factory.communicator(max_tokens=max(1, *map(num_copies, factory.run.workloads)))
    copies = expand(rank.routing, factory.run.shape.placement)
    of_copies = factory.by_communicator(comm, rank.x.index_select(0, copies.copy_to_token), copies.routing)

    def combine(rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return sum_copies(of_copies.combine(rows, handle), copies.copy_to_token, len(rank.x))

    return replace(of_copies, combine=combine)


def _fusco(factory: ShuffleFactory, rank: RankInput, balancer: str | None = None) -> Shuffle:
    return factory.by_communicator(factory.communicator(balancer), rank.x, rank.routing)


def _static(factory: ShuffleFactory, rank: RankInput, *, is_graph: bool = False) -> Shuffle:
    comm, routing = factory.communicator(), rank.routing
    static = StaticRows(max(1, comm.dispatch(rank.x, routing.topk_idx, routing.topk_weights).handle.num_rows))
    return factory.by_communicator(comm, rank.x, routing, static, is_graph=is_graph)


MAKERS: dict[str, Callable[[ShuffleFactory, RankInput], Shuffle]] = {
    "fusco": _fusco,
    "fusco-static": _static,
    "fusco-graph": partial(_static, is_graph=True),
    "baseline": _baseline,
    "deep_ep": _deep_ep,
    "deep_ep_v2": _deep_ep_v2,
    "deep_ep_v2-graph": partial(_deep_ep_v2, is_graph=True),
    "no-engine": _no_engine,
    "no-planner": _no_planner,
    "no-lanes": partial(_fusco, balancer=WITHOUT_LANES),
    "no-balancer": partial(_fusco, balancer="static"),
}

"""Variants that ``fusco bench shuffle`` compares: their names, which of them are measured where, and their factories.

The command line reads the names, so what loads torch is imported when a variant is made.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from fusco.core.profile import CallProfile

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from fusco.api.communicator import Communicator
    from fusco.bench.shuffle_run import ShuffleRun
    from fusco.bench.traffic import Workload
    from fusco.bench.verification import WorldInput
    from fusco.core.config import StaticRows
    from fusco.planner.routing import Routing

    Sent = tuple[torch.Tensor, Any, Any]  # expert-major rows, rows of each local expert, what combine needs

_Kept = TypeVar("_Kept")

# How often a sum is rounded if parts of it travel from each node, and if they travel from each rank before.
_PARTS_OF_NODES, _PARTS_OF_RANKS = 2, 3
_WITHOUT_LANES = "send-and-receive"  # a balancer by which every rank sends its rows


@dataclass(frozen=True)
class Shuffle:
    """One variant on one rank.

    Attributes:
        dispatch: returns expert-major rows, rows of each local expert, and what ``combine`` needs.
        combine: returns token-major rows.
        profile: returns the profile of the latest call of either.
        is_graph: whether it is captured in a CUDA graph and replayed.
        num_roundings: how often a sum of 16-bit rows may be rounded: where its parts travel, and at the end.
        is_ordered: whether the rows of an expert are in the order that is specified, and not in order of arrival.
    """

    dispatch: Callable[[], Sent]
    combine: Callable[[torch.Tensor, Any], torch.Tensor]
    profile: Callable[[], CallProfile] = CallProfile
    is_graph: bool = False
    num_roundings: int = _PARTS_OF_NODES
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
        from fusco.core.config import Launch

        super().__init__()
        self.group, self.run = group, run
        self._launch = Launch(num_sms=run.num_sms)
        self._communicators: dict[tuple[str, int], Communicator] = {}
        self._kept: dict[str, Any] = {}

    def make(self, variant: str, workload: Workload, world: WorldInput) -> Shuffle:
        """Return the variant of this name, on this rank's part of the input of all ranks."""
        from fusco.planner.routing import Routing

        make = VARIANTS[variant].make
        assert make is not None, variant
        rank = self.group.rank()
        return make(
            self, RankInput(workload, world.rows[rank], Routing(world.topk_idx[rank], world.topk_weights[rank]))
        )

    def communicator(self, balancer: str | None = None, max_tokens: int | None = None) -> Communicator:
        """Return a communicator with the run's balancer and number of tokens, unless others are given."""
        from fusco.api.communicator import Communicator
        from fusco.planner.balancer import BALANCERS

        run, shape = self.run, self.run.shape
        key = (balancer or run.balancer, max_tokens or shape.tokens)
        if key not in self._communicators:
            comm = Communicator(
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
            self._communicators[key] = self.enter_context(comm)
        return self._communicators[key]

    def keep(self, variant: str, make: Callable[[], AbstractContextManager[_Kept]]) -> _Kept:
        """Return what ``make`` makes for this variant's first workload; it serves those that follow, too."""
        if variant not in self._kept:
            self._kept[variant] = self.enter_context(make())
        kept: _Kept = self._kept[variant]
        return kept

    def by_communicator(
        self,
        comm: Communicator,
        x: torch.Tensor,
        routing: Routing,
        static: StaticRows | None = None,
        *,
        is_graph: bool = False,
    ) -> Shuffle:
        """Return dispatch and combine of a communicator."""
        return Shuffle(
            lambda: self.dispatch(comm, x, routing, static),
            lambda rows, handle: self.combine(comm, rows, handle),
            lambda: comm.profile,
            is_graph,
            # On CUDA parts of a sum travel between the ranks of a node, too.
            _PARTS_OF_RANKS if self.run.device == "cuda" and self.run.has_nodes else _PARTS_OF_NODES,
        )

    def dispatch(self, comm: Communicator, x: torch.Tensor, routing: Routing, static: StaticRows | None = None) -> Sent:
        """Dispatch on the multiprocessors that the run allows."""
        sent = comm.dispatch(x, routing.topk_idx, routing.topk_weights, static=static, launch=self._launch)
        return sent.rows, sent.num_rows_per_expert, sent.handle

    def combine(self, comm: Communicator, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Combine on the multiprocessors that the run allows."""
        return comm.combine(rows, handle, launch=self._launch)

    @cached_property
    def max_copies(self) -> int:
        """Tokens that a communicator without planner must have room for."""
        from fusco.bench.internode_bytes import num_copies

        return max(1, *map(num_copies, self.run.workloads))


def _baseline(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    from fusco.bench.baseline import BaselineShuffle

    baseline = BaselineShuffle(factory.group, rank.workload.placement, rank.workload.topology, rank.x.device)
    return Shuffle(_of_routing(baseline, rank), baseline.combine, lambda: baseline.profile)


def _no_engine(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    from fusco.bench.no_engine import NoEngineShuffle
    from fusco.planner.balancer import BALANCERS

    balancer = BALANCERS[balancer_of("no-engine", factory.run.balancer, factory.run.device)]
    explicit = NoEngineShuffle(factory.group, rank.workload.placement, rank.workload.topology, balancer)
    return Shuffle(
        _of_routing(explicit, rank), explicit.combine, lambda: explicit.profile, num_roundings=_PARTS_OF_RANKS
    )


def _deep_ep(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    from fusco.bench.peers import BufferShuffle

    num_experts, num_sms = rank.workload.placement.num_experts, factory.run.num_sms
    shuffle = factory.keep("deep_ep", lambda: BufferShuffle(factory.group, num_experts, num_sms))
    return Shuffle(lambda: shuffle.dispatch(rank.x, rank.routing), shuffle.combine)


def _deep_ep_v2(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    from fusco.bench.peers import ElasticBufferShuffle

    shuffle = factory.keep(
        "deep_ep_v2", lambda: ElasticBufferShuffle(factory.group, rank.workload, factory.run.num_sms)
    )
    # A product with a weight is rounded before parts of a sum are.
    return Shuffle(
        lambda: shuffle.dispatch(rank.x, rank.routing),
        shuffle.combine,
        num_roundings=_PARTS_OF_RANKS,
        is_ordered=False,
    )


def _of_routing(shuffle: Any, rank: RankInput) -> Callable[[], Sent]:
    return lambda: shuffle.dispatch(rank.x, rank.routing.topk_idx, rank.routing.topk_weights)


def _no_planner(factory: ShuffleFactory, rank: RankInput) -> Shuffle:
    from fusco.bench.no_planner import NoPlannerShuffle, expand

    comm = factory.communicator(max_tokens=factory.max_copies)
    expanded = NoPlannerShuffle(
        lambda rows, routing: factory.dispatch(comm, rows, routing),
        lambda rows, handle: factory.combine(comm, rows, handle),
        rank.x,
        expand(rank.routing, factory.run.shape.placement),
    )
    return Shuffle(expanded.dispatch, expanded.combine, lambda: comm.profile)


def _fusco(factory: ShuffleFactory, rank: RankInput, balancer: str | None = None) -> Shuffle:
    return factory.by_communicator(factory.communicator(balancer), rank.x, rank.routing)


def _static(factory: ShuffleFactory, rank: RankInput, *, is_graph: bool = False) -> Shuffle:
    from fusco.core.config import StaticRows

    comm, routing = factory.communicator(), rank.routing
    static = StaticRows(max(1, comm.dispatch(rank.x, routing.topk_idx, routing.topk_weights).handle.num_rows))
    return factory.by_communicator(comm, rank.x, routing, static, is_graph=is_graph)


@dataclass(frozen=True)
class Variant:
    """One entry of ``VARIANTS``.

    Attributes:
        description: shown below tables.
        make: makes it on one rank; ``None`` for what ``fusco.bench.device_shuffle`` measures by other means.
    """

    description: str
    make: Callable[[ShuffleFactory, RankInput], Shuffle] | None


VARIANTS = {
    "fusco": Variant("output sized exactly", _fusco),
    "fusco-static": Variant("static rows", _static),
    "fusco-graph": Variant("static rows, in a CUDA graph", partial(_static, is_graph=True)),
    "fusco-fp8": Variant("as fusco-graph, float8 values and their scales", None),
    "baseline": Variant("all_to_all_single, index_select, and one pass that gathers and sums", _baseline),
    "deep_ep": Variant("DeepEP's Buffer (version 1), one index_select, one pass that gathers and sums", _deep_ep),
    "deep_ep_v2": Variant(
        "DeepEP's ElasticBuffer (version 2), expanded, rows in order of arrival; one pass for weights", _deep_ep_v2
    ),
    "no-engine": Variant(
        "fusco's plan and balancer, by isend and irecv, all_to_all_single and index_select", _no_engine
    ),
    "no-planner": Variant(
        "a copy of a token for each rank that needs it, through fusco; copies are made untimed, summed timed",
        _no_planner,
    ),
    "no-lanes": Variant(
        "as fusco, every rank sends its rows itself, by the balancer send-and-receive",
        partial(_fusco, balancer=_WITHOUT_LANES),
    ),
    "no-balancer": Variant(
        "as fusco, ranks of the same local rank forward for each other", partial(_fusco, balancer="static")
    ),
}

# FUSCO section 5.4, Table 3: what is left without the engine, the planner, lanes, the balancer.
ABLATION = ("no-engine", "no-planner", "no-lanes", "no-balancer")
# Of a library that may be installed; what cannot be set up is left out.
PEERS = ("deep_ep", "deep_ep_v2")
# One copy of a token for each node that needs it, and no more.
DEDUPLICATED = ("fusco", "fusco-static", "no-engine", "no-lanes", "no-balancer")


def has_fixed_messages(variant: str, device: str) -> bool:
    """Return whether a variant sends a row of every token to each other node, whatever the routing."""
    return device == "cuda" and variant in ("fusco-static", "fusco-graph")


def balancer_of(variant: str, balancer: str, device: str) -> str:
    """Return the name of the balancer that a variant uses in a run with ``balancer``.

    >>> [balancer_of(variant, "lanes", "cpu") for variant in ("fusco", "no-engine", "no-balancer")]
    ['lanes', 'send-and-receive', 'static']
    """
    if variant == "baseline":
        return "none"
    if variant == "no-balancer" or has_fixed_messages(variant, device):
        return "static"
    is_without = variant == "no-lanes" or (variant == "no-engine" and balancer == "lanes")  # every rank sends its rows
    return _WITHOUT_LANES if is_without else balancer


def choose_variants(
    device: str, num_nodes: int, selected: Sequence[str] = (), *, with_ablation: bool = False
) -> tuple[str, ...]:
    """Return the variants to measure, in order.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        num_nodes: how many nodes there are.
        selected: names, instead of the default ones.
        with_ablation: add ``ABLATION``.

    Raises:
        ValueError: for a name that is not offered there.

    >>> choose_variants("cuda", 2, with_ablation=True)
    ('fusco', 'fusco-static', 'fusco-graph', 'baseline', 'no-engine', 'no-planner', 'no-lanes', 'no-balancer')
    >>> choose_variants("cpu", 2, ["no-engine", "fusco"])
    ('no-engine', 'fusco')
    """
    default, others = _offered(device, num_nodes)
    if with_ablation and not set(ABLATION) <= {*default, *others}:
        raise ValueError(f"the ablation needs traffic between nodes, but there is {num_nodes} node: pass --nodes")
    for name in selected:
        if name not in (*default, *others):
            where = f"{device} with {num_nodes} node{'s' if num_nodes > 1 else ''}"
            raise ValueError(f"variant {name!r} is none of those on {where}: {', '.join((*default, *others))}")
    return tuple(dict.fromkeys((*(selected or default), *(ABLATION if with_ablation else ()))))


def recorded_variant(variants: Sequence[str]) -> str | None:
    """Return the variant that a timeline shows: with static rows, where nothing waits on the host, if possible."""
    return next((name for name in ("fusco-static", "fusco") if name in variants), None)


def _offered(device: str, num_nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the default variants, and the others that can be selected."""
    ablation = ABLATION if num_nodes > 1 else ()
    if device == "cpu":
        return ("fusco", "baseline"), ("fusco-static", *ablation)
    if num_nodes > 1:
        return ("fusco", "fusco-static", "fusco-graph", "baseline"), ablation
    peers = PEERS if importlib.util.find_spec("deep_ep") else ()
    return ("fusco", "fusco-graph", "baseline", *peers, "fusco-fp8"), ("fusco-static",)

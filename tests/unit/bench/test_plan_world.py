"""A thousand routings: plans of all ranks, executed row by row, match the specification and their costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import SystemRandom
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fusco.bench.explain import PlanCost, plan_cost, plan_world
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import BALANCERS
from fusco.planner.dispatch_plan import DispatchPlan
from fusco.planner.routing import Routing
from generator import KINDS, Case, number_of
from law import Law, Pair
from scattered_lanes import ScatteredLanes

TOPOLOGIES = {
    "1x1": (0,),
    "1x4": (0, 0, 0, 0),
    "2x1": (0, 1),
    "4x1": (0, 1, 2, 3),
    "2x2": (0, 0, 1, 1),
    "2x2 interleaved": (0, 1, 0, 1),
    "3x2": (0, 0, 1, 1, 2, 2),
    "3x2 shuffled": (0, 1, 2, 2, 0, 1),
    "2x3": (0, 0, 0, 1, 1, 1),
}
ROUTINGS_PER_TOPOLOGY = 110  # 990 in all, and others in every run of the tests
BYTES_PER_TOKEN = 14
BALANCER_NAMES = (*BALANCERS, "scattered")


def balancer_of(name, max_tokens, topology):
    return ScatteredLanes(max_tokens * (topology.num_nodes - 1)) if name == "scattered" else BALANCERS[name]


def case_number(number: int, kind: str, world_size: int) -> tuple[Case, ExpertPlacement, int]:
    """Return a case, a placement and an alignment, derived from the number."""
    num_experts = world_size * number_of(1, 3, number, "experts")
    case = Case(
        kind=kind,
        seed=number,
        world_size=world_size,
        num_experts=num_experts,
        num_topk=number_of(1, 8, number, "topk"),
        max_tokens=number_of(1, 5, number, "tokens"),
    )
    placement = ExpertPlacement.contiguous(num_experts, world_size)
    if number % 3 == 0:  # uneven: every other expert is on one of two ranks, so that ranks are left without any
        random_ranks = [number_of(0, world_size - 1, number, "owner", expert) for expert in range(num_experts)]
        crowded = [rank if expert % 2 else number % world_size for expert, rank in enumerate(random_ranks)]
        placement = ExpertPlacement.explicit(crowded, world_size)
    return case, placement, (1, 1, 2, 4, 7)[number % 5]


def routings_of(case: Case) -> list[Routing]:
    weights = case.world_topk_weights() if case.seed % 2 else [None] * case.world_size
    dtype = torch.int32 if case.seed % 4 < 2 else torch.int64
    return [Routing(ids.to(dtype), w) for ids, w in zip(case.world_topk_idx, weights, strict=True)]


def pool_rows(plans: Sequence[DispatchPlan], node: int, topology: Topology) -> list[tuple[int, int]]:
    """Return the (source, token) of every row on a node after forwarding, by source."""
    rows = []
    for src, plan in enumerate(plans):
        if topology.rank_to_node[src] == node:
            rows += [(src, token) for token in range(plan.num_rows_from(src))]
        else:
            rows += [(src, token) for token in plan.forwarding.node_to_tokens[node].tolist()]
    return rows


def execute(plan: DispatchPlan, pool: Sequence[tuple[int, int]]) -> list[Pair | None]:
    """Execute a rank's distribution on the rows of its node's pool."""
    slots: list[Pair | None] = [None] * plan.distribution.num_slots
    pairs = plan.distribution
    arrays = (pairs.pair_to_row, pairs.pair_to_k, pairs.pair_to_slot)
    for row, k, slot in zip(*(array.tolist() for array in arrays), strict=True):
        assert slots[slot] is None, f"slot {slot} is filled twice"
        slots[slot] = Pair(*pool[row], k)
    assert [slot for slot, pair in enumerate(slots) if pair is None] == pairs.padding_slots.tolist()
    return slots


def check_world(plans: Sequence[DispatchPlan], law: Law, topology: Topology) -> None:
    nodes = topology.rank_to_node
    for node in range(topology.num_nodes):
        pool = pool_rows(plans, node, topology)
        received = [(src, token) for src, token in pool if nodes[src] != node]
        wanted = [
            (src, token)
            for src in law.ranks
            for token in range(len(law.topk_idx[src]))
            if nodes[src] != node and node in law.nodes_of(src, token, nodes)
        ]
        assert received == wanted  # one copy of each wanted token, none of any other
        for rank in topology.node_to_ranks[node]:
            plan = plans[rank]
            assert plan.routing.topk_idx.tolist() == [law.topk_idx[src][token] for src, token in pool]
            assert execute(plan, pool) == law.slots(rank)
            assert plan.distribution.num_rows_per_expert.tolist() == law.counts(rank)
            check_lanes(plan, plans, topology)


def check_lanes(plan: DispatchPlan, plans: Sequence[DispatchPlan], topology: Topology) -> None:
    """Sender and receiver of every run agree on it, on its place, and on the order of what passes between them."""
    lanes = plan.rank_lanes
    places = lanes.received.offsets_by(lanes.received.forwarder)
    assert places.tolist() == [0, *np.cumsum(lanes.received.num_rows)][: len(places)]  # without gaps
    for peer in range(topology.world_size):
        carried = plans[peer].rank_lanes.carried
        sent = carried.select(carried.forwarder == plan.rank)
        arriving = lanes.received.select(lanes.received.carrier == peer)
        assert all(map(np.array_equal, sent, arriving))
    distances = (np.array(topology.rank_to_node)[lanes.incoming.src] - plan.node) % topology.num_nodes
    assert (np.diff(distances) >= 0).all()  # so that nodes do not all return sums to the same one first
    own = lanes.own
    for src, node, first, end, carrier, forwarder, place in zip(*own, lanes.own_places, strict=True):
        assert src == plan.rank
        carried = plans[carrier].rank_lanes.carried
        is_it = (carried.src == src) & (carried.node == node) & (carried.first == first)
        assert carried.offsets_by(carried.carrier)[is_it].tolist() == [place]
        held = plans[forwarder].rank_lanes.received
        assert ((held.src == src) & (held.first == first) & (held.end == end)).sum() == 1
    assert own.num_rows.sum() == sum(len(plan.forwarding.node_to_tokens[n]) for n in topology.remote_nodes(plan.rank))


class SentRow(NamedTuple):
    """A token that crosses to a node, and the ranks that send and receive it."""

    src: int
    node: int
    token: int
    carrier: int
    forwarder: int


def sent_rows(plans: Sequence[DispatchPlan]) -> list[SentRow]:
    return [
        SentRow(src, node, token, carrier, forwarder)
        for src, node, first, end, carrier, forwarder in zip(*(c.tolist() for c in plans[0].lanes.runs), strict=True)
        for token in plans[src].forwarding.node_to_tokens[node][first:end].tolist()
    ]


def brute_force_cost(law: Law, plan: DispatchPlan, crossing: list[SentRow], weight_bytes: int) -> PlanCost:
    nodes, rank = plan.topology.rank_to_node, plan.rank
    sent = sum(row.src == rank for row in crossing)
    holder = {(row.src, row.token): row.forwarder for row in crossing if row.node == plan.node}
    read = {(pair.src, pair.token) for pair in law.slots(rank) if pair}
    local = [(src, token) for src, token in read if holder.get((src, token), src) == rank]
    remote_pairs = [
        1
        for experts in law.topk_idx[rank]
        for expert in experts
        if expert >= 0 and nodes[law.expert_to_rank[expert]] != plan.node
    ]
    return PlanCost(
        internode_send_bytes=sum(row.carrier == rank for row in crossing) * BYTES_PER_TOKEN,
        lane_bytes=sum(row.carrier == rank != row.src for row in crossing) * BYTES_PER_TOKEN,
        intranode_bytes=(len(read) - len(local)) * BYTES_PER_TOKEN,
        metadata_bytes=sent * plan.routing.topk_idx.shape[1] * (4 + weight_bytes),
        internode_bytes_avoided=(len(remote_pairs) - sent) * BYTES_PER_TOKEN,
    )


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_plans_match_the_specification(name):
    topology = Topology(TOPOLOGIES[name])
    first = SystemRandom().randrange(1_000_000)
    for number in range(first, first + ROUTINGS_PER_TOPOLOGY):
        case, placement, alignment = case_number(number, KINDS[number % len(KINDS)], topology.world_size)
        balancer = balancer_of(BALANCER_NAMES[number % len(BALANCER_NAMES)], case.max_tokens, topology)
        routings = routings_of(case)
        plans = plan_world(routings, placement, topology, balancer, alignment)
        law = Law([routing.topk_idx for routing in routings], placement.expert_to_rank, alignment)
        try:
            check_world(plans, law, topology)
            weight_bytes = 0 if routings[0].topk_weights is None else 4
            crossing = sent_rows(plans)
            for plan in plans:
                assert plan_cost(plan, BYTES_PER_TOKEN) == brute_force_cost(law, plan, crossing, weight_bytes)
        except AssertionError as error:
            raise AssertionError(f"{case}, {placement}, alignment {alignment}: {error}") from error


@pytest.mark.parametrize(("number", "name"), list(enumerate(["2x2", "3x2", "2x3"] * len(KINDS))))
def test_the_choice_of_forwarders_does_not_change_the_output(name, number):
    topology = Topology(TOPOLOGIES[name])
    case, placement, alignment = case_number(number, KINDS[number % len(KINDS)], topology.world_size)
    balancers = [balancer_of(each, case.max_tokens, topology) for each in BALANCER_NAMES]
    worlds = [plan_world(routings_of(case), placement, topology, b, alignment) for b in balancers]
    for plans in zip(*worlds, strict=True):
        first, *others = [
            [value for value in (*vars(plan.distribution).values(), plan.routing.topk_idx) if value is not None]
            for plan in plans
        ]
        for other in others:
            assert len(first) == len(other)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, other, strict=True))


def test_weights_are_sent_with_their_ids():
    topology = Topology(TOPOLOGIES["2x2"])
    case = dataclasses.replace(case_number(1, "ragged with holes", 4)[0], max_tokens=9)
    routings = routings_of(case)
    for plan in plan_world(routings, ExpertPlacement.contiguous(case.num_experts, 4), topology, BALANCERS["static"]):
        law = Law([routing.topk_idx for routing in routings], plan.placement.expert_to_rank)
        pairs = plan.distribution
        routed = torch.empty(pairs.num_slots)
        routed[pairs.pair_to_slot] = plan.routing.topk_weights[pairs.pair_to_row, pairs.pair_to_k]
        assert torch.equal(routed, law.row_weights(plan.rank, [routing.topk_weights for routing in routings]))


@st.composite
def worlds(draw):
    """Draw any routing; hypothesis shrinks it to the smallest that fails."""
    nodes = draw(st.sampled_from(list(TOPOLOGIES.values())))
    num_experts, num_topk = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=num_experts, max_size=num_experts))
    token = st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk)
    ids = [draw(st.lists(token, max_size=3)) for _ in nodes]
    topk_idx = [torch.tensor(rows, dtype=torch.int64).view(-1, num_topk) for rows in ids]
    return Topology(nodes), ExpertPlacement.explicit(owners, len(nodes)), topk_idx


@given(worlds(), st.sampled_from(BALANCER_NAMES), st.integers(1, 9))
def test_plans_of_any_routing(world, balancer, alignment):
    topology, placement, topk_idx = world
    plans = plan_world(list(map(Routing, topk_idx)), placement, topology, balancer_of(balancer, 3, topology), alignment)
    check_world(plans, Law(topk_idx, placement.expert_to_rank, alignment), topology)

"""Rows sent between nodes, and their places: by hand, against the planner, and for any traffic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fusco import BALANCERS, ExpertPlacement, Groups, Lanes, Topology, Traffic
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.kernels.plan import PlanShape, PlanTensors
from fusco.cuda.kernels.plan_forwarding import ForwardingTensors
from fusco.planner.internode import InternodeTraffic, Piece
from scattered_lanes import ScatteredLanes


def three_nodes() -> InternodeTraffic:
    """Seen from rank 2 of three nodes with two ranks each; ranks 0, 3 and 4 are a group, and so are 1, 2 and 5."""
    groups = Groups(Topology((0, 0, 1, 1, 2, 2)), ((0, 1, 0), (1, 0, 1)))
    num_rows = ((0, 5, 1), (0, 3, 1), (4, 0, 2), (1, 0, 7), (6, 2, 0), (6, 8, 0))
    return InternodeTraffic(2, Lanes.of_groups(groups, num_rows), num_rows)


def test_who_sends_to_whom_by_hand():
    traffic = three_nodes()
    assert traffic.node == 1
    assert traffic.destinations == (0, 2)
    assert [(piece.node, piece.forwarder) for piece in traffic.sends(0, 9)] == [(0, 1), (2, 5)]
    assert traffic.sources == (1, 5)
    assert traffic.num_forwarded == 3 + 8
    assert not traffic.is_shared
    assert traffic.num_rows_on_node([9, 9, 4, 0, 9, 9]) == [5, 3, 4, 0, 2, 8]


def test_slices_by_hand():
    traffic = three_nodes()
    assert traffic.num_slices(rows_per_slice=3) == 3  # of the 8 rows of rank 5, and of the 7 that rank 3 sends
    received = [[piece[:1] + piece[2:4] for piece in traffic.receives(2, number, 3)] for number in range(3)]
    assert received == [[(1, 0, 3), (5, 0, 3)], [(5, 3, 6)], [(5, 6, 8)]]


def test_slices_of_rows_that_another_rank_carries():
    # Rank 1 sends rows 2 to 6 of rank 0 after one of its own; rank 2 receives what fits, rank 3 the last row.
    runs = [(0, 1, 0, 2, 0, 2), (1, 1, 0, 1, 1, 2), (0, 1, 2, 5, 1, 2), (0, 1, 5, 6, 1, 3)]
    lanes = Lanes.of_runs(Topology((0, 0, 1, 1)), runs)
    world = [InternodeTraffic(rank, lanes, ((0, 6), (0, 1), (0, 0), (0, 0))) for rank in range(4)]
    assert [traffic.is_shared for traffic in world] == [True, True, False, False]
    assert world[0].num_slices(2) == 3  # of the five rows that rank 1 sends
    own, first, second, third = (
        Piece(1, 1, 0, 1, 1, 2, 0),
        Piece(0, 1, 2, 3, 1, 2, 1),
        *(Piece(0, 1, 3, 5, 1, 2, 2), Piece(0, 1, 5, 6, 1, 3, 4)),
    )
    assert [world[1].sends(number, 2) for number in range(3)] == [[own, first], [second], [third]]
    assert world[2].receives(3, 2, 2) == world[3].receives(3, 2, 2) == [third._replace(place=-1)]
    assert [piece[:4] for piece in world[2].receives(2, 0, 2)] == [(0, 1, 0, 2), own[:4], first[:4]]
    assert [traffic.sources for traffic in world] == [(), (), (0, 1), (0,)]
    # Four rows in a slice are too many for a forwarder with room for three.
    assert (world[2].fit(2, 4), world[2].fit(2, 3)) == (2, 1)


def test_nothing_crosses_without_other_nodes_or_rows():
    def none(rank, topology, num_rows):
        return InternodeTraffic(rank, Lanes.of_groups(Groups.of_same_local_rank(topology), num_rows), num_rows)

    alone, empty = none(1, Topology((0, 0)), ((0,), (0,))), none(0, Topology((0, 1)), ((0, 0), (0, 0)))
    assert (alone.destinations, alone.sources, alone.num_slices(4), alone.num_forwarded) == ((), (), 0, 0)
    assert (empty.num_slices(1), empty.num_forwarded, empty.fit(5, 1)) == (0, 0, 5)


@st.composite
def traffics(draw):
    """What all ranks of a random world see."""
    num_nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world_size, is_interleaved = num_nodes * ranks_per_node, draw(st.booleans())
    topology = (
        Topology(tuple(rank % num_nodes for rank in range(world_size)))
        if is_interleaved
        else Topology.of_equal_nodes(world_size, ranks_per_node)
    )
    counts = st.lists(st.integers(0, draw(st.sampled_from([0, 1, 30]))), min_size=num_nodes, max_size=num_nodes)
    drawn = draw(st.lists(counts, min_size=world_size, max_size=world_size))
    num_rows = tuple(
        tuple(0 if node == topology.rank_to_node[rank] else count for node, count in enumerate(of_rank))
        for rank, of_rank in enumerate(drawn)
    )
    traffic = Traffic.from_counts(topology, num_rows)
    balancers = [*BALANCERS.values(), ScatteredLanes(30 * num_nodes)]
    lanes = traffic.lanes_of(draw(st.sampled_from(balancers))(traffic))
    return [InternodeTraffic(rank, lanes, num_rows) for rank in range(world_size)]


@given(traffics(), st.integers(1, 12))
def test_every_row_is_in_one_slice_and_both_ends_cut_alike(world, rows_per_slice):
    topology, num_slices = world[0].lanes.topology, world[0].num_slices(rows_per_slice)
    crossed = {(src, node): [] for src in range(topology.world_size) for node in range(topology.num_nodes)}
    for traffic in world:
        assert traffic.num_slices(rows_per_slice) == num_slices
        places = []
        for number in range(num_slices):
            sent = traffic.sends(number, rows_per_slice)
            for piece in sent:
                there = world[piece.forwarder].receives(piece.forwarder, number, rows_per_slice)
                assert piece._replace(place=-1) in there
                assert topology.rank_to_node[piece.src] == traffic.node != piece.node
                crossed[piece.src, piece.node] += range(piece.first, piece.end)
                places += range(piece.place, piece.place + piece.num_rows)
            for node in range(topology.num_nodes):
                assert sum(piece.num_rows for piece in sent if piece.node == node) <= rows_per_slice
            of_node = [traffic.receives(rank, number, rows_per_slice) for rank in traffic.node_ranks]
            for rank, received in zip(traffic.node_ranks, of_node, strict=True):
                assert received == world[rank].receives(rank, number, rows_per_slice)
        assert sorted(places) == list(range(len(places)))  # sums return to places of their own
    for (src, node), rows in crossed.items():
        assert sorted(rows) == list(range(world[0].num_rows[src][node] if node != topology.rank_to_node[src] else 0))


@given(traffics(), st.integers(1, 40), st.data())
def test_no_forwarder_gets_more_in_a_slice_than_it_holds(world, rows_per_slice, data):
    topology = world[0].lanes.topology
    num_others = topology.world_size - topology.ranks_per_node
    max_held = data.draw(st.integers(num_others, 2 * num_others + 40))
    fitting = world[0].fit(rows_per_slice, max_held)
    assert 1 <= fitting <= rows_per_slice
    for traffic in world:
        assert traffic.fit(rows_per_slice, max_held) == fitting
        for number in range(traffic.num_slices(fitting)):
            received = traffic.receives(traffic.rank, number, fitting)
            assert sum(piece.num_rows for piece in received) <= max(max_held, 1)


def plan_of(
    traffic: InternodeTraffic, num_tokens: list[int], num_topk: int, *, has_weights: bool = True
) -> InternodePlan:
    """A plan whose every entry is another number."""
    num_rows = traffic.num_rows_on_node(num_tokens)
    first_row, held = (0, *itertools.accumulate(num_rows)), (traffic.rank, *traffic.sources)
    num_held, none = sum(num_rows[src] for src in held), torch.empty(0, dtype=torch.int32)
    tables = PlanTensors.of(
        PlanShape(first_row[-1], num_held, num_topk, 1, torch.float32 if has_weights else None), torch.device("cpu")
    )
    tables.row_to_slots.copy_(torch.arange(first_row[-1] * num_topk).view(-1, num_topk))
    if has_weights:
        tables.weights.copy_(tables.row_to_slots * 0.5)
    tables.token_to_ranks.copy_(torch.arange(num_held) + 1000)
    return InternodePlan(
        rank=traffic.rank,
        placement=ExpertPlacement.contiguous(1, 1),
        first_row=first_row,
        held=held,
        num_slots=0,
        num_topk=num_topk,
        tables=tables,
        traffic=traffic,
        forwarding=ForwardingTensors(none, 0, 0),
    )


class Operations(TorchDispatchMode):
    """What PyTorch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def square_world(num_nodes: int, *, are_nodes_interleaved: bool = False) -> InternodePlan:
    """The plan of rank 1 where every rank has three tokens for every other node."""
    world_size = num_nodes**2
    rank_to_node = tuple(rank % num_nodes if are_nodes_interleaved else rank // num_nodes for rank in range(world_size))
    num_rows = tuple(tuple(3 * (node != own) for node in range(num_nodes)) for own in rank_to_node)
    lanes = Lanes.of_groups(Groups.of_same_local_rank(Topology(rank_to_node)), num_rows)
    return plan_of(InternodeTraffic(1, lanes, num_rows), [5] * world_size, 2)


@pytest.mark.parametrize("num_nodes", [2, 8])
def test_own_rows_cost_nothing_where_a_nodes_ranks_follow_each_other(num_nodes):
    plan = square_world(num_nodes)
    with Operations() as asked:
        own = plan.own_rows
        assert own.addresses == plan.all_rows.addresses
    assert asked.names == []
    assert own.tensors == ()


@pytest.mark.parametrize("num_nodes", [2, 8])
def test_own_rows_are_copied_together_where_they_stand_apart(num_nodes):
    with Operations() as asked:
        own = square_world(num_nodes, are_nodes_interleaved=True).own_rows
    assert asked.names.count("cat") == 3  # slots, weights, marks
    assert len(own.tensors[0]) == 5 * num_nodes


def test_a_plan_without_weights_has_none_in_its_slices():
    traffic = three_nodes()
    plan = plan_of(traffic, [9] * 6, 2, has_weights=False)
    assert [held.addresses.weights for held in (plan.own_rows, *plan.slices(4))] == [0, 0, 0]


def test_what_a_plan_holds_on_the_device_is_told_without_gaps():
    plan = plan_of(three_nodes(), [9] * 6, 2)
    on_device = {id(plan.tables.memory), id(plan.forwarding.memory)}
    assert {id(tensor) for tensor in plan.tensors} == on_device

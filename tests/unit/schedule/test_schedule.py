"""Schedules of all ranks: every byte is followed from its source to its destination."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fusco import Topology
from fusco.schedule import Stages, Transfers, check_schedule, find_faults, make_schedule

MODES = ["exact", "few", "spread-out"]

# FAST's Fig. 10, from its text: three nodes A, B, C of two ranks. B1 sends the maximum, 10 units, and so B0 receives.
# After balancing, A and C send and A and B receive the maximum, 8 units on each lane.
FIG_10 = np.array(
    [
        [0, 3, 4, 2, 2, 1],
        [1, 0, 2, 2, 2, 1],
        [1, 0, 0, 2, 1, 0],
        [2, 3, 1, 0, 2, 3],
        [3, 2, 3, 1, 0, 4],
        [3, 2, 1, 1, 2, 0],
    ]
)


def between_nodes(rank_bytes, topology):
    node = np.array(topology.rank_to_node)
    return np.where(node[:, None] != node, rank_bytes, 0)


def labels(transfers):
    """Yield (from_rank, to_rank, label) of every byte; byte ``i`` of a message has the label (src, dst, i)."""
    columns = [getattr(transfers, field.name).tolist() for field in fields(transfers)]
    for sender, receiver, src, dst, first, size, _ in zip(*columns, strict=True):
        for i in range(first, first + size):
            yield sender, receiver, (src, dst, i)


def move(held, transfers):
    """Move all bytes at once: no rank can send what it receives here."""
    moves = list(labels(transfers))
    for sender, receiver, label in moves:
        assert label in held[sender], f"rank {sender} does not have {label} for rank {receiver}"
    for _, receiver, label in moves:
        held[receiver].add(label)


def run(schedule) -> np.ndarray:
    """Execute a schedule on labelled bytes, stage by stage; return the number of bytes of each message that arrive."""
    held = [set() for _ in range(schedule.topology.world_size)]
    for (src, dst), size in np.ndenumerate(schedule.rank_bytes):
        held[src] |= {(src, dst, i) for i in range(size)}
    move(held, schedule.local)
    move(held, schedule.balancing)
    for stage in range(schedule.stages.num_stages):
        move(held, schedule.internode.select(schedule.internode.stage == stage))
        move(held, schedule.redistribution.select(schedule.redistribution.stage == stage))
    arrived = np.zeros_like(schedule.rank_bytes)
    for rank, labels_held in enumerate(held):
        for src, dst, _ in labels_held:
            arrived[src, dst] += dst == rank
    return arrived


def test_fig_10():
    topology = Topology.of_equal_nodes(6, 2)
    internode = between_nodes(FIG_10, topology)
    assert internode.sum(axis=1).tolist() == [9, 7, 2, 10, 9, 7]
    assert internode.sum(axis=0).tolist() == [9, 7, 10, 6, 7, 5]
    schedule = make_schedule(FIG_10, topology)
    check_schedule(schedule)
    assert schedule.stages.node_bytes().tolist() == [[0, 10, 6], [6, 0, 6], [10, 6, 0]]
    assert schedule.stages.total_bytes == 2 * 8
    lanes = schedule.internode.load(6)
    assert lanes.tolist() == [[8, 8, 6, 6, 8, 8], [8, 8, 8, 8, 6, 6]]
    assert np.array_equal(run(schedule), FIG_10)


def test_only_surplus_moves_and_what_needs_no_balancing_goes_first():
    # Rank 0 has 7 bytes for node 1, rank 1 has 2: shares of 5 and 4, so 2 bytes move.
    rank_bytes = np.zeros((4, 4), np.int64)
    rank_bytes[0, 2], rank_bytes[0, 3], rank_bytes[1, 2] = 4, 3, 2
    schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(4, 2))
    check_schedule(schedule)
    moved = schedule.balancing
    assert (moved.from_rank.tolist(), moved.to_rank.tolist(), moved.num_bytes.tolist()) == ([0], [1], [2])
    assert moved.dst_rank.tolist() == [3]  # those that lane 1 delivers directly
    sent = schedule.internode
    table = zip(sent.from_rank.tolist(), sent.src_rank.tolist(), sent.dst_rank.tolist(), sent.num_bytes, strict=True)
    assert list(table) == [(0, 0, 2, 4), (0, 0, 3, 1), (1, 1, 2, 2), (1, 0, 3, 2)]


def test_a_lane_with_two_links_carries_twice_as_much():
    rank_bytes = np.zeros((4, 4), np.int64)
    rank_bytes[:2, 2:] = 3
    schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(4, 2), lane_links=(2, 1))
    check_schedule(schedule)
    assert schedule.internode.load(4).tolist() == [[8, 4, 0, 0], [0, 0, 8, 4]]
    assert schedule.balancing.num_bytes.tolist() == [2]


def test_messages_within_nodes_are_direct():
    rank_bytes = np.arange(16).reshape(4, 4)
    schedule = make_schedule(rank_bytes, Topology((0, 1, 0, 1)))
    check_schedule(schedule)
    columns = (schedule.local.from_rank, schedule.local.to_rank, schedule.local.num_bytes)
    local = {(src, dst): size for src, dst, size in zip(*(column.tolist() for column in columns), strict=True)}
    assert local == {(0, 2): 2, (1, 1): 5, (1, 3): 7, (2, 0): 8, (2, 2): 10, (3, 1): 13, (3, 3): 15}


@st.composite
def any_schedules(draw):
    num_nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    order = draw(st.permutations([node for node in range(num_nodes) for _ in range(ranks_per_node)]))
    names = {node: i for i, node in enumerate(dict.fromkeys(order))}
    topology = Topology(tuple(names[node] for node in order))
    largest = draw(st.sampled_from([1, 5, 30]))
    is_sparse = draw(st.booleans())
    sizes = st.one_of(st.just(0), st.just(0), st.integers(0, largest)) if is_sparse else st.integers(0, largest)
    row = st.lists(sizes, min_size=len(order), max_size=len(order))
    rank_bytes = np.array(draw(st.lists(row, min_size=len(order), max_size=len(order))))
    links = draw(st.none() | st.lists(st.integers(1, 3), min_size=ranks_per_node, max_size=ranks_per_node).map(tuple))
    return make_schedule(rank_bytes, topology, mode=draw(st.sampled_from(MODES)), lane_links=links)


@given(any_schedules())
def test_any_schedule_delivers_every_byte(schedule):
    check_schedule(schedule)
    assert np.array_equal(run(schedule), schedule.rank_bytes)
    for received in schedule.internode.load(schedule.topology.world_size):
        by_node, links = received[np.array(schedule.topology.node_to_ranks)], np.array(schedule.lane_links)
        difference = by_node - by_node.sum(axis=1, keepdims=True) / links.sum() * links
        assert np.abs(difference).max() <= (schedule.topology.num_nodes - 1) * links.max()  # of each pair of nodes


@pytest.mark.parametrize("mode", MODES)
def test_larger_shapes_and_the_same_everywhere(mode):
    random = np.random.default_rng(0)
    for num_nodes, ranks_per_node in ((8, 8), (5, 3)):
        topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
        size = topology.world_size
        rank_bytes = random.integers(0, 10**9, (size, size)) * (random.random((size, size)) < 0.5)
        schedule, again = (make_schedule(matrix, topology, mode=mode) for matrix in (rank_bytes, rank_bytes.tolist()))
        check_schedule(schedule)
        for name in ("local", "balancing", "internode", "redistribution"):
            one, other = getattr(schedule, name), getattr(again, name)
            assert all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Transfers))


def test_transfers_of_one_rank():
    schedule = make_schedule(FIG_10, Topology.of_equal_nodes(6, 2))
    sent = sum(len(schedule.internode.sent_by(rank)) for rank in range(6))
    received = sum(len(schedule.internode.received_by(rank)) for rank in range(6))
    assert sent == received == len(schedule.internode)


def test_very_large_messages():
    rank_bytes = np.full((4, 4), 2**60)
    schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(4, 2))
    check_schedule(schedule)
    with pytest.raises(ValueError, match="node 0 has 9223372036854775808 bytes for node 1, more than int64 holds"):
        make_schedule(rank_bytes * 2, Topology.of_equal_nodes(4, 2))


def test_invalid_arguments_are_rejected():
    topology = Topology.of_equal_nodes(4, 2)
    with pytest.raises(ValueError, match="rank_bytes is for 2 ranks, the topology has 4"):
        make_schedule(np.zeros((2, 2), np.int64), topology)
    with pytest.raises(ValueError, match="must not be negative, got -3 from rank 2 to rank 1"):
        make_schedule(-3 * (np.arange(16).reshape(4, 4) == 9), topology)
    with pytest.raises(ValueError, match="mode must be one of 'exact', 'few', 'spread-out', got 'best'"):
        make_schedule(np.zeros((4, 4), np.int64), topology, mode="best")
    with pytest.raises(TypeError, match="must hold integers, got float64"):
        make_schedule(np.zeros((4, 4)), topology)
    for links in ((1,), (1, 0)):
        with pytest.raises(ValueError, match=r"lane_links must be 2 positive numbers, got \(1,"):
            make_schedule(np.zeros((4, 4), np.int64), topology, lane_links=links)


def with_value(transfers, name, index, value):
    changed = getattr(transfers, name).copy()
    changed[index] = value
    return replace(transfers, **{name: changed})


def with_stages(schedule, **changes):
    stages = schedule.stages
    parts = {name: getattr(stages, name).copy() for name in ("dst_node", "num_bytes", "duration_bytes")}
    for name, (index, value) in changes.items():
        parts[name][index] = value
    return replace(schedule, stages=Stages(**parts))


def corruptions(schedule):
    """Yield corrupted schedules with one fault each, and the text that the checker must report."""
    for name in ("local", "balancing", "internode", "redistribution"):
        transfers = getattr(schedule, name)
        everything = np.arange(len(transfers))
        yield f"{name} lacks bytes", replace(schedule, **{name: transfers.select(everything[1:])})
        twice = replace(schedule, **{name: transfers.select(np.append(everything, everything[-1]))})
        yield f"{name} has", twice
        longer = with_value(transfers, "num_bytes", -1, transfers.num_bytes[-1] + 1)
        yield f"{name} has bytes", replace(schedule, **{name: longer})
        later = with_value(transfers, "first_byte", 0, transfers.first_byte[0] + 1)
        yield f"{name} has bytes", replace(schedule, **{name: later})
    internode, redistribution = schedule.internode, schedule.redistribution
    elsewhere = with_value(internode, "to_rank", 0, internode.to_rank[0] ^ 1)
    yield "between nodes goes", replace(schedule, internode=elsewhere)
    yield "lanes carry for others", replace(schedule, balancing=schedule.balancing.select(slice(0)))
    other_stage = with_value(redistribution, "stage", 0, redistribution.stage[0] + 1)
    yield "redistribution has bytes", replace(schedule, redistribution=other_stage)
    elsewhere = with_value(schedule.local, "to_rank", 0, (schedule.local.to_rank[0] + 2) % 6)
    yield "local leaves the node", replace(schedule, local=elsewhere)
    no_stage = with_value(internode, "stage", 0, 99)
    yield "between nodes names stages", replace(schedule, internode=no_stage)
    first = (0, 0)
    yield "receives from several", with_stages(schedule, dst_node=(first, schedule.stages.dst_node[0, 1]))
    yield "to itself", with_stages(schedule, dst_node=(first, 0))
    yield "which has", with_stages(schedule, num_bytes=(first, schedule.stages.duration_bytes[0] + 1))
    yield "stages send", with_stages(schedule, num_bytes=(first, schedule.stages.num_bytes[0, 0] - 1))
    yield "the busiest node waits", with_stages(schedule, duration_bytes=(0, schedule.stages.duration_bytes[0] + 1))


def test_the_checker_finds_every_corruption():
    schedule = make_schedule(FIG_10, Topology.of_equal_nodes(6, 2))
    assert not list(find_faults(schedule))
    for expected, corrupted in corruptions(schedule):
        faults = list(find_faults(corrupted))
        assert any(expected in fault for fault in faults), (expected, faults)
        with pytest.raises(ValueError, match="not a valid schedule"):
            check_schedule(corrupted)


def test_uneven_lanes_and_long_stages_are_faults():
    schedule = make_schedule(FIG_10, Topology.of_equal_nodes(6, 2), mode="few")
    longer = with_stages(schedule, duration_bytes=(0, schedule.stages.duration_bytes[0] + 1))
    assert any("more than 2 % longer" in fault for fault in find_faults(longer))
    internode = schedule.internode
    uneven = replace(schedule, internode=internode.select(internode.from_rank % 2 == 0))
    assert any("ranks of node 0 send" in fault for fault in find_faults(uneven))

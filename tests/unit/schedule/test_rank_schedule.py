"""Rank schedules, executed in any order on labelled bytes: every byte arrives, without a circular wait."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fusco import Topology
from fusco.engine.all_to_all import cut_flow
from fusco.schedule import make_schedule
from fusco.schedule.rank_schedule import ARRIVED, CARRIED, INPUT, NUM_MEMORIES, OUTPUT, Flow, make_rank_schedule
from matrices import families

MODES = ["exact", "few", "spread-out"]
UNWRITTEN = -1


class Rank:
    """Memories of a rank, in which every byte of a message has a unique number, and its remaining messages."""

    def __init__(self, rank_schedule, rank, rank_bytes, slice_bytes):
        ends = (rank_bytes[rank].sum(), rank_bytes[:, rank].sum())  # INPUT, OUTPUT
        self.memories = [np.full(size, UNWRITTEN) for size in (*ends, *rank_schedule.spare_bytes)]
        self.memories[INPUT][:] = labels(rank_bytes, [(rank, dst) for dst in range(len(rank_bytes))])
        self.filled = [0] * rank_schedule.num_regions
        within, across = rank_schedule.sends_within, rank_schedule.sends_across
        self.sends = [messages(flows, slice_bytes) for flows in (*within.values(), across)]
        self.receives = {peer: messages(flows, slice_bytes) for peer, flows in rank_schedule.receives_within.items()}
        self.internode_receives = messages(rank_schedule.receives_across, slice_bytes)
        (source, *_), (target, *_) = (pieces.tolist() for pieces in rank_schedule.own)
        self.write([(OUTPUT, *target[1:])], self.memories[INPUT][source[1] :][: source[2]])

    def is_ready(self, message):
        return all(span.region < 0 or self.filled[span.region] >= span.end for span in message.spans)

    def read(self, message):
        return np.concatenate([self.memories[span.memory][span.offset : span.end] for span in message.spans])

    def write(self, spans, values):
        for memory, begin, size, region in spans:
            place = self.memories[memory][begin : begin + size]
            assert (place == UNWRITTEN).all(), "written twice"
            place[:], values = values[:size], values[size:]
            if region >= 0:
                self.filled[region] = begin + size
        assert not len(values)


def labels(rank_bytes, pairs):
    """Return the numbers of the bytes of messages, one message after the other."""
    first = np.cumsum(rank_bytes.ravel()) - rank_bytes.ravel()
    size = len(rank_bytes)
    parts = [first[src * size + dst] + np.arange(rank_bytes[src, dst]) for src, dst in pairs]
    return np.concatenate(parts)


def messages(flows, slice_bytes):
    return [message for flow in flows for message in cut_flow(flow, slice_bytes)]


def deliver(sender, rank, ranks, topology):
    """Deliver the first message of a list; ``False`` if it or its receiver is not ready."""
    message = sender[0]
    source, receiver = ranks[rank], ranks[message.peer]
    is_within = topology.rank_to_node[rank] == topology.rank_to_node[message.peer]
    expected = receiver.receives[rank] if is_within else receiver.internode_receives
    if not source.is_ready(message) or expected[0].peer != rank:
        return False
    assert expected[0].num_bytes == message.num_bytes
    receiver.write(expected.pop(0).spans, source.read(sender.pop(0)))
    return True


def follow(rank_bytes, topology, mode, slice_bytes, seed=0):
    """Execute all rank schedules in random order, and check everything."""
    schedule = make_schedule(rank_bytes, topology, mode=mode)
    size = topology.world_size
    ranks = [Rank(make_rank_schedule(schedule, rank), rank, rank_bytes, slice_bytes) for rank in range(size)]
    choice = random.Random(seed)
    while any(senders := [(sends, rank) for rank in range(size) for sends in ranks[rank].sends if sends]):
        choice.shuffle(senders)
        assert any(deliver(sends, rank, ranks, topology) for sends, rank in senders), "circular wait"
    for rank, state in enumerate(ranks):
        assert not state.internode_receives
        assert not any(state.receives.values())
        expected = labels(rank_bytes, [(src, rank) for src in range(size)])
        assert state.memories[OUTPUT].tolist() == expected.tolist()
        assert all((state.memories[memory] != UNWRITTEN).all() for memory in range(NUM_MEMORIES))
    return schedule, ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (8, 2), (6, 2), (6, 3), (4, 4), (4, 1), (1, 1)])
def test_everything_arrives(num_ranks, ranks_per_node, mode):
    topology = Topology.of_equal_nodes(num_ranks, ranks_per_node)
    for name, matrix in families(num_ranks).items():
        rank_bytes = np.minimum(matrix % 61, 60) + np.eye(num_ranks, dtype=np.int64) * 3
        follow(rank_bytes, topology, mode, slice_bytes=11, seed=len(name))


@given(data=st.data(), mode=st.sampled_from(MODES), slice_bytes=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_matrix(data, mode, slice_bytes, seed):
    nodes, ranks_per_node = data.draw(st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (3, 2)]))
    size = nodes * ranks_per_node
    sizes = st.one_of(st.just(0), st.integers(0, 50))
    rank_bytes = np.array(data.draw(st.lists(sizes, min_size=size**2, max_size=size**2)), np.int64).reshape(size, size)
    follow(rank_bytes, Topology.of_equal_nodes(size, ranks_per_node), mode, slice_bytes, seed)


def test_ranks_assigned_to_nodes_in_turn():
    follow(np.arange(36).reshape(6, 6), Topology((0, 1, 0, 1, 0, 1)), "exact", slice_bytes=7)


def test_memory_sizes_are_the_bytes_carried_and_arrived_for_others():
    rank_bytes = np.random.default_rng(0).integers(0, 50, (6, 6))
    schedule, ranks = follow(rank_bytes, Topology.of_equal_nodes(6, 2), "exact", slice_bytes=1000)
    for rank, state in enumerate(ranks):
        assert len(state.memories[CARRIED]) == schedule.balancing.received_by(rank).num_bytes.sum()
        assert len(state.memories[ARRIVED]) == schedule.redistribution.sent_by(rank).num_bytes.sum()


def test_balancing_comes_in_the_order_of_stages():
    rank_bytes = np.zeros((6, 6), np.int64)
    rank_bytes[0, 2:] = [40, 0, 8, 0]
    schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(6, 2))
    assert schedule.stages.num_bytes[:, 0].tolist() == [8, 40]
    [balancing] = make_rank_schedule(schedule, 0).sends_within[1]
    assert balancing.pieces[:, 1:3].tolist() == [[44, 4], [20, 20]]  # to node 2 first


def test_an_empty_flow_has_no_messages():
    assert not list(cut_flow(Flow(1, 0, np.empty((0, 4), np.int64)), 8))
    assert not list(cut_flow(Flow(1, 0, np.array([[INPUT, 5, 0, -1]])), 8))

"""Rounds of records in compiled code: threads play nodes of one rank each."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from meshes import LIMIT_S, mesh_of

from fusco.control.layout import NODE_AGREES_INT, NUM_ATTACHED_INT, ControlLayout
from fusco.control.node_memory import NodeMemory
from fusco.control.record_round import ALL_AGREE, ALL_HERE, MISSING, Attachment, RecordRound, warm_up_record_round
from fusco.control.shared_segment import SharedSegment
from fusco.core.topology import Topology
from store_gathers import on_ranks

NUM_NODES, MOST_ATTACHED = 3, 1 << 22  # more than sockets take at once


@contextmanager
def rounds_of(store_gather, num_nodes=NUM_NODES):
    """A rank's memory, its mesh, and rounds over it."""
    warm_up_record_round()
    layout = ControlLayout(Topology(tuple(range(num_nodes))), attachment_bytes=MOST_ATTACHED)
    memory = NodeMemory(layout, store_gather.rank, [SharedSegment.create(layout.num_bytes)])
    mesh = mesh_of(store_gather)
    try:
        yield memory, mesh, RecordRound(memory, mesh.transport.descriptors)
    finally:
        mesh.transport.close()
        memory.close()


def publish(memory, words):
    """Write the first words of this rank's record."""
    struct.pack_into(f"{len(words)}q", memory.own_record, 0, *words)


def complete(mesh, rounds, memory, message):
    """Finish a round in Python, as ``RecordExchange`` does."""
    to = {memory.counterpart(node): node for node in memory.layout.topology.remote_nodes(memory.rank)}
    moved = dict(zip(to, rounds.progress, strict=True))

    def behind(peer):
        return memory.attachment(to[peer])[: memory.record_bytes(0, to[peer]).cast("q")[NUM_ATTACHED_INT]]

    into = {peer: memory.record_bytes(0, node) for peer, node in to.items()}
    mesh.begin({peer: message(node) for peer, node in to.items()}, into, behind, moved)
    deadline, arrived = time.monotonic() + LIMIT_S, mesh.poll()
    while not mesh.is_done:
        assert time.monotonic() < deadline
        arrived += mesh.poll()
    return arrived + mesh.poll()


def attachment_of(rank, number):
    """What a rank attaches in a round: to each other node another number of bytes."""
    sizes = [0 if node == rank else (node * 7 + number) * 1000 % 5001 for node in range(NUM_NODES)]
    if number == 2:
        sizes = [MOST_ATTACHED * (node != rank) for node in range(NUM_NODES)]
    memory = torch.arange(sum(sizes), dtype=torch.int64).add_(rank).to(torch.uint8)
    return Attachment(memory, np.array([0, *np.cumsum(sizes)]))


def message_of(memory, attachment, has_node_agreed=0):
    def message(node):
        header = np.frombuffer(bytes(memory.own_record), np.int64).copy()
        header[NUM_ATTACHED_INT], header[NODE_AGREES_INT] = len(attachment.part(node)), has_node_agreed
        return header.tobytes() + bytes(attachment.part(node))

    return message


def test_every_node_gets_the_records_of_all_others_and_its_part_of_what_they_attach():
    def talk(store_gather):
        rank, found = store_gather.rank, []
        with rounds_of(store_gather) as (memory, mesh, rounds):
            for number in range(1, 6):
                attachment = attachment_of(rank, number)
                publish(memory, [5, 6, 0, 0, 0, 0, 0, 100 * rank + number])
                memory.announce_record(number)
                if rounds.run(number, attachment, has_node_agreed=False) == MISSING:
                    complete(mesh, rounds, memory, message_of(memory, attachment))
                of_round = {}
                for node in memory.layout.topology.remote_nodes(rank):
                    words = memory.record_bytes(0, node).cast("q")
                    of_round[node] = words[7], bytes(memory.attachment(node)[: words[NUM_ATTACHED_INT]])
                found.append(of_round)
        return found

    for rank, found in on_ranks(NUM_NODES, talk).items():
        assert not isinstance(found, BaseException), found
        for number, of_round in enumerate(found, 1):
            assert of_round == {
                node: (100 * node + number, bytes(attachment_of(node, number).part(rank)))
                for node in range(NUM_NODES)
                if node != rank
            }


@pytest.mark.parametrize(
    ("digests", "agreed", "expected"),
    [
        ((5, 5, 5), (1, 1, 1), [ALL_AGREE] * 3),
        ((5, 5, 5), (1, 1, 0), [ALL_HERE] * 3),
        ((5, 5, 4), (1, 1, 1), [ALL_HERE] * 3),
    ],
)
def test_all_agree_only_if_every_node_says_so_and_its_record_is_equal(digests, agreed, expected):
    def talk(store_gather):
        rank = store_gather.rank
        with rounds_of(store_gather) as (memory, _, rounds):
            publish(memory, [digests[rank], 6])
            memory.announce_record(1)
            barrier.wait(LIMIT_S)
            return rounds.run(1, None, has_node_agreed=bool(agreed[rank])), rounds.progress

    barrier = threading.Barrier(NUM_NODES)
    size = ControlLayout(Topology(tuple(range(NUM_NODES)))).record_bytes
    for _ in range(5):  # a rank may be late on a loaded machine
        found = on_ranks(NUM_NODES, talk)
        if all(outcome != MISSING for outcome, _ in found.values()):
            break
    assert [found[rank] for rank in range(NUM_NODES)] == [(outcome, [(size, size)] * 2) for outcome in expected]


def test_a_round_gives_up_soon_and_goes_on_in_python():
    """Rank 1 comes late: rank 0 has sent its record, and gets the other one in the round that goes on."""
    has_given_up = threading.Event()

    def talk(store_gather):
        with rounds_of(store_gather, 2) as (memory, mesh, rounds):
            bounds = np.array([(0, 0, 72), (0, 72, 72)][store_gather.rank])
            attachment = Attachment(torch.full((9,), store_gather.rank), bounds)
            publish(memory, [5, 6, 0, 0, 0, 0, 0, store_gather.rank])
            memory.announce_record(1)
            if store_gather.rank == 1:
                has_given_up.wait(LIMIT_S)
            outcome, before = rounds.run(1, attachment, has_node_agreed=False), rounds.progress
            has_given_up.set()
            arrived = complete(mesh, rounds, memory, message_of(memory, attachment)) if outcome == MISSING else []
            other = 1 - store_gather.rank
            record, behind = memory.record_bytes(0, other).cast("q"), memory.attachment(other)
            return outcome, before, arrived, record[7], bytes(behind[:72])

    found, size = on_ranks(2, talk), ControlLayout(Topology((0, 1))).record_bytes
    assert found[0] == (MISSING, [(size + 72, 0)], [1], 1, torch.full((9,), 1).numpy().tobytes())
    assert found[1][3:] == (0, torch.full((9,), 0).numpy().tobytes())


def test_a_connection_that_has_ended_does_not_hold_up_a_round():
    has_gone = threading.Event()

    def talk(store_gather):
        with rounds_of(store_gather, 2) as (_, mesh, rounds):
            if store_gather.rank == 1:
                mesh.transport.close()
                has_gone.set()
                return None
            has_gone.wait(LIMIT_S)
            return [rounds.run(number, None, has_node_agreed=False) for number in (1, 2)]

    assert on_ranks(2, talk)[0] == [MISSING] * 2


def test_a_size_that_no_memory_has_is_not_received():
    def talk(store_gather):
        with rounds_of(store_gather, 2) as (memory, mesh, rounds):
            if store_gather.rank == 1:
                message = np.zeros(memory.layout.record_bytes // 8 + 4, np.int64)
                message[NUM_ATTACHED_INT] = MOST_ATTACHED + 8
                mesh.transport._connections[0].sendall(message.tobytes())
                has_sent.set()
                has_looked.wait(LIMIT_S)
                return None
            has_sent.wait(LIMIT_S)
            outcome, progress = rounds.run(1, None, has_node_agreed=False), rounds.progress
            has_looked.set()
            return outcome, progress[0][1] - memory.layout.record_bytes, bytes(memory.attachment(1)[:8])

    has_sent, has_looked = threading.Event(), threading.Event()
    assert on_ranks(2, talk)[0] == (MISSING, 0, bytes(8))

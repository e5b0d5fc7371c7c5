"""``all_to_all`` on CUDA without a GPU: on simulated nodes every byte arrives, whatever the matrix and the schedule."""

from __future__ import annotations

import ctypes
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fusco.bench.host.null_device import NullStream
from fusco.bench.inputs.matrices import make_matrix
from fusco.core.profile import CallProfile
from fusco.core.topology import Topology
from fusco.cuda.all_to_all import MessageRounds
from fusco.schedule.rank_schedule import make_rank_schedule
from fusco.schedule.schedule import make_schedule
from generator import any_bits
from reference import copy_segments as twin

CPU = torch.device("cpu")
_LIMIT_S = 30.0


class Network:
    """Replaces ``fusco.cuda.between_nodes.network.Network`` on one rank: bytes move, a round at a time.

    Both ends of a message must have it in the same round, and all come to their rounds in order: NCCL would wait for
    ever otherwise.
    """

    stream = NullStream()  # everything is done when it has been launched

    def __init__(self, rank, mailboxes):
        self._rank, self._mailboxes = rank, mailboxes

    def exchange(self, sends, receives, what):
        for message in sends:
            self._mailboxes[self._rank, message.peer].put((what, ctypes.string_at(message.address, message.num_bytes)))
        for message in receives:
            theirs, came = self._mailboxes[message.peer, self._rank].get(timeout=_LIMIT_S)
            assert (theirs, len(came)) == (what, message.num_bytes)
            ctypes.memmove(message.address, came, len(came))


def matrices(num_ranks):
    random = np.random.default_rng(num_ranks)
    shape = (num_ranks, num_ranks)
    one_sender = np.zeros(shape, np.int64)
    one_sender[num_ranks // 2] = random.integers(1, 60, num_ranks)
    return {
        "uniform": np.full(shape, 9),
        "random": random.integers(0, 40, shape),
        "zipf": make_matrix("zipf", num_ranks, largest=200, skew=0.8),
        "one sender": one_sender,
        "one receiver": one_sender.T.copy(),
        "empty splits": random.integers(0, 40, shape) * (random.random(shape) < 0.3),
        "nothing": np.zeros(shape, np.int64),
    }


def exchange(topology, matrix, mode):
    """All ranks' outputs, and what each counted."""
    everyone = range(topology.world_size)
    mailboxes = {(src, dst): queue.Queue() for src in everyone for dst in everyone}
    schedule = make_schedule(matrix, topology, mode=mode)
    sent = [any_bits((int(matrix[rank].sum()),), torch.uint8, "sent", rank) for rank in range(topology.world_size)]

    def run(rank):
        rank_schedule, profile = make_rank_schedule(schedule, rank), CallProfile()
        output = torch.full((int(matrix[:, rank].sum()),), 0xFF, dtype=torch.uint8)
        ends = [sent[rank], output]
        MessageRounds(rank_schedule, ends, Network(rank, mailboxes), twin.copy_segments, CPU).run(profile)
        return output, profile

    with ThreadPoolExecutor(topology.world_size) as threads:
        results = list(threads.map(run, range(topology.world_size)))
    assert all(left.empty() for left in mailboxes.values()), "messages were sent and not received"
    return sent, results


@pytest.mark.parametrize("mode", ["exact", "few", "spread-out"])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 2), (3, 2), (4, 1), (2, 4)])
def test_every_matrix(num_nodes, ranks_per_node, mode):
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    nodes = np.array(topology.rank_to_node)
    for name, matrix in matrices(topology.world_size).items():
        sent, results = exchange(topology, matrix, mode)
        for rank, (output, _) in enumerate(results):
            parts = [sent[src].split(matrix[src].tolist())[rank] for src in range(topology.world_size)]
            assert torch.equal(output, torch.cat(parts)), f"{name}: rank {rank}"
        between = int(matrix[nodes[:, None] != nodes].sum())
        assert sum(profile.internode_row_bytes for _, profile in results) == between, name

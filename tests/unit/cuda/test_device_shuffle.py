"""``shuffle`` between nodes on CUDA without a GPU: with lanes every byte arrives where it belongs, and nothing else."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engine_parts import engine_of
from repeated_rig import CAPACITY, LIMIT_S, NUM_EXPERTS, Node

from fusco import BALANCERS, Segments, Settings, Topology, TransportError
from fusco.api.validation import Validator
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call, CallProfile
from fusco.engine.base import ShuffleRequest
from fusco.schedule.cost import CUDA_LINKS
from generator import any_bits, number_of

GAP_BYTES = 3
REQUEST = ShuffleRequest(send={}, receive={}, has_lanes=True)


@pytest.fixture
def lanes_pay():
    """Ranks are so unequal that lanes are used, however little they send; rings are small."""
    with (
        mock.patch("fusco.engine.all_to_all.are_lanes_worth_it", return_value=True),
        mock.patch("fusco.bench.host.null_device.Settings", lambda **given: Settings(**given | {"slice_bytes": 4096})),
    ):
        yield


def scattered(total_bytes: int, *what: int | str) -> Segments:
    """Segments of unequal sizes, some empty, in reverse order with gaps between them; of one or of a wider dtype."""
    cuts = sorted(number_of(0, total_bytes, *what, "cut", i) for i in range(max(0, number_of(-5, 6, *what))))
    sizes = torch.tensor([*cuts, total_bytes]) - torch.tensor([0, *cuts])
    ends = (sizes + GAP_BYTES).flip(0).cumsum(0).flip(0)
    dtype = (torch.uint8, torch.float32)[total_bytes % 2]
    memory = any_bits((-(-(int(ends[0]) + GAP_BYTES) // dtype.itemsize),), dtype, *what, "memory")
    return Segments(memory, ends - sizes, sizes)


def stream(segments: Segments) -> torch.Tensor:
    offsets, sizes = segments.offset_bytes.tolist(), segments.num_bytes.tolist()
    return torch.cat([segments.memory[at : at + size] for at, size in zip(offsets, sizes, strict=True)])


def sizes_of(kind: str, num_ranks: int) -> np.ndarray:
    """Bytes from each rank to each other."""
    random = np.random.default_rng(num_ranks)
    sizes = random.integers(0, 900, (num_ranks, num_ranks))
    if kind == "one sender":
        sizes[np.arange(num_ranks) != 1] = 0
    elif kind == "one receiver":
        sizes[:, np.arange(num_ranks) != 1] = 0
    elif kind == "few":
        sizes *= random.random(sizes.shape) < 0.3
    return sizes


def shuffle(sizes: np.ndarray, have_all_ended: threading.Barrier, comm: Any, *_: object) -> int:
    """One rank's part of a shuffle; return the bytes that it sent to other nodes."""
    rank, everyone = comm.rank, range(len(sizes))
    send = {dst: scattered(int(sizes[rank, dst]), "send", rank, dst) for dst in everyone if sizes[rank, dst]}
    receive = {src: scattered(int(sizes[src, rank]), "to", src, rank) for src in everyone if sizes[src, rank]}
    expected = {src: scattered(int(sizes[src, rank]), "to", src, rank).memory for src in receive}
    for src, part in receive.items():
        sent = stream(scattered(int(sizes[src, rank]), "send", src, rank)).split(part.num_bytes.tolist())
        for offset, piece in zip(part.offset_bytes.tolist(), sent, strict=True):
            expected[src][offset : offset + len(piece)] = piece
    comm.shuffle(send, receive)
    have_all_ended.wait(LIMIT_S)  # a rank that leaves would end what others have under way
    assert all(torch.equal(receive[src].memory, expected[src]) for src in receive)
    return comm.profile.internode_row_bytes


@pytest.mark.parametrize("ring_depth", [2, 3, 4])
def test_single_and_scattered_segments_pass_through_small_rings(ring_depth, folder):
    settings = {"slice_bytes": 128, "ring_depth": ring_depth}
    sizes = np.random.default_rng(ring_depth).integers(0, 2000, (3, 3))
    counts = {
        tuple(len(scattered(int(sizes[pair]), end, *pair).num_bytes) == 1 for end in ("send", "to"))
        for pair in np.ndindex(3, 3)
    }
    assert len(counts) > 2, "one segment, and several, to one and to several"
    with (
        mock.patch("fusco.bench.host.null_device.Settings", lambda **given: Settings(**given | settings)),
        mock.patch("repeated_rig.NUM_EXPERTS", 3),
    ):
        Node(topology=Topology((0, 0, 0)), folder=folder).run(partial(shuffle, sizes, threading.Barrier(3)))


@pytest.mark.parametrize("kind", ["random", "one sender", "one receiver", "few"])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.usefixtures("lanes_pay")
def test_segments_arrive_over_lanes(kind, num_nodes, ranks_per_node, folder):
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    nodes = np.array(topology.rank_to_node)
    sizes = sizes_of(kind, topology.world_size)

    have_all_ended = threading.Barrier(topology.world_size)
    with mock.patch("repeated_rig.NUM_EXPERTS", topology.world_size):
        sent = Node(topology=topology, folder=folder).run(partial(shuffle, sizes, have_all_ended))
    crossing = np.where(nodes[:, None] != nodes, sizes, 0)
    for node, ranks in enumerate(topology.node_to_ranks):
        of_node = [sent[rank] for rank in ranks]
        assert sum(of_node) == crossing[nodes == node].sum()
        assert max(of_node) - min(of_node) < num_nodes, "a lane carries its share of the bytes for each other node"


@pytest.mark.parametrize(("balancer", "has_lanes"), [("lanes", True), ("send-and-receive", False), ("static", False)])
def test_the_balancer_says_whether_segments_have_lanes(balancer, has_lanes):
    validator = Validator(
        rank=0,
        placement=ExpertPlacement.of(NUM_EXPERTS, None, 2),
        balancer=BALANCERS[balancer],
        capacity=CAPACITY,
        wire_dtype=None,
        device=torch.device("cpu"),
    )
    assert validator.validate_shuffle({}, {}).has_lanes is has_lanes


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, _: engine.prepare_shuffle(REQUEST, Call(1, CallProfile())).run([(0, 0, 0, 0)] * 2),
        lambda engine, segments: engine.stream("gather_send to rank 1", {1: segments}, {}),
        lambda engine, segments: engine.stream("scatter_recv from rank 1", {}, {1: segments}),
    ],
    ids=["shuffle", "gather_send", "scatter_recv"],
)
def test_what_did_not_arrive_since_the_network_was_aborted_is_an_error(call):
    """Events of messages that were aborted are reached nevertheless."""
    engine = engine_of(
        topology=Topology((0, 1)),
        rank=0,
        links=CUDA_LINKS,
        arena=SimpleNamespace(layout=SimpleNamespace(slot_bytes=1)),
        order=SimpleNamespace(on_stream=lambda *_: nullcontext()),
        watchdog=mock.Mock(check_device=mock.Mock(side_effect=TransportError("aborted"))),
        streams=lambda _: SimpleNamespace(tasks=lambda *_: [mock.Mock(is_done=True)]),
    )
    with pytest.raises(TransportError, match="aborted"):
        call(engine, scattered(64, "any"))

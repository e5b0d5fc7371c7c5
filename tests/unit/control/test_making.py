"""A communicator that cannot be made closes everything, so that other ranks notice at once."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch

from fusco import BALANCERS, Capacity, ExpertPlacement, Settings, Topology
from fusco.api.create import connect_parts
from fusco.api.validation import Validator
from fusco.control.bootstrap import PeerInfo
from fusco.core.config import EngineConfig
from store_gathers import on_ranks

LIMIT_S = 10.0


WHERE = ("cpu.engine.torch.empty", "cpu.engine.RoutingExchange", "cpu.engine.TcpTransport", "api.create.Session")


def validator(rank: int, capacity: Capacity) -> Validator:
    return Validator(
        rank=rank,
        placement=ExpertPlacement.contiguous(2, 2),
        balancer=BALANCERS["static"],
        capacity=capacity,
        wire_dtype=None,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("where", WHERE)
def test_a_communicator_without_room_closes_its_connections(where):
    topology = Topology.of_equal_nodes(2, 1)
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    config, peer_info = EngineConfig(topology, capacity, Settings()), PeerInfo(["here"] * 2, [], "127.0.0.1")
    before = threading.active_count()
    with mock.patch(f"fusco.{where}", side_effect=MemoryError("no room")):
        errors = on_ranks(
            2,
            lambda store_gather: connect_parts(store_gather, config, peer_info, validator(store_gather.rank, capacity)),
        )
    assert [type(error) for error in errors.values()] == [MemoryError] * 2
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before

"""A communicator that cannot be made closes everything, so that other ranks notice at once."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pkgutil import resolve_name
from unittest import mock

import pytest
import torch

from fusco import BALANCERS, Capacity, ExpertPlacement, Settings, Topology
from fusco.api.create import CommunicatorParts, connect_parts
from fusco.api.validation import Validator
from fusco.control.bootstrap import PeerInfo
from fusco.control.connect import raise_if_any
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.tcp_transport import TcpTransport
from fusco.core.config import EngineConfig
from fusco.core.errors import PeerFailureError, SharedMemoryError
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


def parts_of(store_gather) -> CommunicatorParts:
    topology = Topology.of_equal_nodes(2, 1)
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    config, peer_info = EngineConfig(topology, capacity, Settings()), PeerInfo(["here"] * 2, [], "127.0.0.1")
    return connect_parts(store_gather, config, peer_info, validator(store_gather.rank, capacity))


def test_what_several_ranks_lack_is_said_once():
    with pytest.raises(SharedMemoryError, match=r"^ranks 0-1, 4: no room; rank 5: no descriptors$"):
        raise_if_any(mock.Mock(members=(0, 1, 3, 4, 5)), ["no room", "no room", "", "no room", "no descriptors"])


def test_nothing_is_compiled_for_a_communicator_that_one_rank_has_no_room_for():
    has_compiled, free = mock.Mock(), [0, 1 << 40]  # of the machine, when the ranks look
    with (
        mock.patch("fusco.api.create.warm_up", has_compiled),
        mock.patch("fusco.control.shared_segment.free_bytes", side_effect=free),
    ):
        errors = on_ranks(2, parts_of)
    for error in errors.values():
        assert type(error) is SharedMemoryError
        assert "room for 0; lower max_tokens_per_rank" in str(error)
    has_compiled.assert_not_called()


@pytest.mark.parametrize("where", WHERE)
def test_a_rank_without_room_tells_the_others_at_once(where):
    here, real = threading.local(), resolve_name(f"fusco.{where}")

    def no_room_on_rank_1(*args, **kwargs):
        if getattr(here, "rank", 0) == 1:
            raise MemoryError("no room")
        return real(*args, **kwargs)

    def make(store_gather):
        here.rank = store_gather.rank
        parts = parts_of(store_gather)  # of which rank 0 may not need the other any more
        with closing(parts.session), closing(parts.engine), parts.session.collective("dispatch"):
            parts.session.agree(CollectiveFingerprint("dispatch"))

    began = time.monotonic()
    with mock.patch(f"fusco.{where}", no_room_on_rank_1):
        errors = on_ranks(2, make)
    assert (type(errors[1]), type(errors[0])) == (MemoryError, PeerFailureError)
    assert errors[0].peers == (1,)
    assert "rank 1 failed while it made the communicator: MemoryError: no room" in str(errors[0])
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("where", WHERE)
def test_a_communicator_without_room_closes_its_connections(where):
    before = threading.active_count()
    with mock.patch(f"fusco.{where}", side_effect=MemoryError("no room")):
        errors = on_ranks(2, parts_of)
    assert [type(error) for error in errors.values()] == [MemoryError] * 2
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_closing_connections_shows_no_rank_as_failed():
    close, has_failed = TcpTransport.close, []

    def close_and_look(transport):
        close(transport)
        has_failed.append(watchdogs[transport].has_failed_rank)  # as a thread that watches may

    def make(store_gather):
        connections = parts_of(store_gather).session.connections
        watchdogs[connections.transport] = connections.watchdog
        connections.close()

    watchdogs = {}
    with mock.patch.object(TcpTransport, "close", close_and_look):
        assert on_ranks(2, make) == {0: None, 1: None}
    assert has_failed == [False, False]


def test_no_descriptor_is_left_if_the_memory_of_a_node_cannot_be_used():
    on_ranks(2, lambda store_gather: parts_of(store_gather).session.close())  # opens what stays open
    before = len(os.listdir("/proc/self/fd"))
    with mock.patch("fusco.control.connect.NodeMemory", side_effect=MemoryError("no room")):
        errors = on_ranks(2, parts_of)
    assert [type(error) for error in errors.values()] == [MemoryError] * 2
    deadline = time.monotonic() + LIMIT_S
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before

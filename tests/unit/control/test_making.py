"""An engine that cannot be made leaves nothing behind, so that other ranks see at once that it is gone."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest

from fusco import Capacity, Settings, Topology
from fusco.control.layout import ArenaLayout
from fusco.cpu.engine import CpuEngine
from rolls import on_ranks

LIMIT_S = 10.0


@pytest.mark.parametrize("what", ["torch.empty", "Rounds", "RoutingExchange", "GlooTransport"])
def test_an_engine_without_room_closes_its_connections(what):
    topology = Topology.of_equal_nodes(2, 1)
    layout = ArenaLayout(topology, Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1), Settings())
    before = threading.active_count()
    with mock.patch(f"fusco.cpu.engine.{what}", side_effect=MemoryError("no room")):
        errors = on_ranks(2, lambda roll: CpuEngine(roll, layout, ["here"] * 2, "127.0.0.1"))
    assert [type(error) for error in errors.values()] == [MemoryError] * 2
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before

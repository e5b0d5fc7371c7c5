"""A wait for the local device blames no peer for work that is queued there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from engine_parts import engine_of
from simulated_device import Machine
from simulated_nodes import Rank, World, request_of

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.core.errors import Stall
from fusco.cuda.failure import own_backlog
from fusco.cuda.memory.layout import DeviceLayout
from fusco.planner.routing import Routing

PLACEMENT = ExpertPlacement.contiguous(4, 4)
PLAN = own_backlog("the plan")
COUNTS = own_backlog("the number of rows for each node")


class Patience:
    """Replaces ``Watchdog``: asks for words at the beginning of a wait, and at its end."""

    def __init__(self, machine: Machine, work: Work) -> None:
        self._machine, self._work = machine, work
        self.stalls: list[tuple[bool, Stall]] = []

    def wait_until(self, is_ready: Any, stall: Any) -> None:
        self.stalls.append((self._work.is_done, stall()))
        self._work.may_end = True
        self._machine.wait(is_ready)
        self.stalls.append((self._work.is_done, stall()))


class Work:
    """The caller's work on a stream, which takes until it may end."""

    def __init__(self, at: Rank) -> None:
        self.may_end = self.is_done = False
        at.stream.launch("work of the caller's", self._end, lambda: self.may_end)

    def _end(self) -> None:
        self.is_done = True


def stalls_of_an_exact_dispatch(num_nodes: int, order: int) -> list[list[tuple[bool, Stall]]]:
    topology = Topology.of_equal_nodes(4, 4 // num_nodes)
    capacity = Capacity(max_tokens_per_rank=4, max_bytes_per_token=16, num_topk=1)
    machine = Machine(order)

    def program(at: Rank) -> list[tuple[bool, Stall]]:
        ids, payload = torch.arange(4).view(4, 1), torch.zeros(4, 4)
        at.context.watchdog = watchdog = Patience(machine, Work(at))
        request = request_of(Routing(ids), payload, PLACEMENT)
        at.dispatch(request)
        return watchdog.stalls

    return World(DeviceLayout(topology, capacity, Settings(slice_bytes=64)), PLACEMENT, machine).run(program)


@pytest.mark.parametrize("order", range(3))
def test_a_plan_is_waited_for_on_the_own_device_until_it_is_begun(order):
    for rank, stalls in enumerate(stalls_of_an_exact_dispatch(1, order)):
        others = tuple(r for r in range(4) if r != rank)
        assert stalls == [(False, PLAN), (True, Stall("planning on the device", others, "the plan", "none yet"))]
    assert PLAN.on_ranks == ()


@pytest.mark.parametrize("order", range(3))
def test_between_nodes_no_peer_is_waited_for_until_rows_are_counted(order):
    for rank, stalls in enumerate(stalls_of_an_exact_dispatch(2, order)):
        assert stalls[:2] == [(False, COUNTS), (True, COUNTS)]
        # Only then for the plan, which needs the node's other rank as soon as the device has come to it.
        of_peer = Stall("planning on the device", (rank ^ 1,), "the plan", "none yet")
        assert stalls[2:] == [(True, PLAN), (True, of_peer)]


def test_synchronize_waits_for_no_peer():
    engine = engine_of(order=mock.Mock(), watchdog=mock.Mock())
    engine.synchronize()
    _, stall = engine._watchdog.wait_until.call_args.args
    assert stall() == own_backlog("all launched work to complete")

"""An exactly sized output is allocated before its size is known, if it can be afforded; the result is the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from simulated_device import Machine
from simulated_nodes import Rank, World, request_of

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.within_node import planning
from fusco.cuda.within_node.planning import affordable_bound
from fusco.planner.routing import Routing

NUM_EXPERTS, ALIGNMENT = 4, 4
IDS = torch.tensor([[0, 3], [1, -1], [3, 2]])


@pytest.fixture(autouse=True)
def forget():
    affordable_bound.cache_clear()
    yield
    affordable_bound.cache_clear()


def noting(deeds: list[str], get):
    """What gets kernels whose launches are noted."""

    def noted(name, constants):
        kernel = get(name, constants)
        launch = kernel.launch
        kernel.launch = lambda *args, **shape: (deeds.append(name), launch(*args, **shape))
        return kernel

    return noted


def rows_of_dispatch(num_ranks: int) -> list[tuple[torch.Tensor, list[str]]]:
    """Rows of each rank, and its launches and waits in order."""
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, num_ranks)
    capacity = Capacity(max_tokens_per_rank=4, max_bytes_per_token=16, num_topk=2)
    layout = DeviceLayout(Topology((0,) * num_ranks), capacity, Settings(slice_bytes=64))

    def program(at: Rank) -> tuple[torch.Tensor, list[str]]:
        deeds, wait = [], at.context.watchdog.wait_until
        at.library.get = noting(deeds, at.library.get)
        at.context.watchdog.wait_until = lambda *how: (deeds.append("wait"), wait(*how))[1]
        payload = torch.arange(12.0).view(3, 4) + 100 * at.rank
        request = request_of(Routing(IDS.clone()), payload, placement, alignment=ALIGNMENT)
        (rows,) = at.dispatch(request).rows
        assert rows._base is None, "a view of a larger tensor"
        assert rows.is_contiguous()
        return rows, deeds

    return World(layout, placement, Machine(seed=num_ranks)).run(program)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_are_the_same_and_the_host_waits_after_the_last_launch(num_ranks, monkeypatch):
    at_once = rows_of_dispatch(num_ranks)
    affordable_bound.cache_clear()
    monkeypatch.setattr(planning, "MAX_EXTRA_BYTES", -1)
    one_by_one = rows_of_dispatch(num_ranks)
    for (rows, deeds), (expected, others) in zip(at_once, one_by_one, strict=True):
        assert torch.equal(rows, expected)
        assert rows.shape[0] % ALIGNMENT == 0
        assert deeds.index("scatter_rows") < deeds.index("wait")
        assert others.index("scatter_rows") > others.index("wait")


def test_without_memory_for_the_bound_there_may_be_enough_for_the_rows():
    full, allocate = [], torch.Tensor.new_empty

    def scarce(tensor: torch.Tensor, *size: int, **options: object) -> torch.Tensor:
        if not full:
            full.append(size)
            raise torch.cuda.OutOfMemoryError("no memory")
        return allocate(tensor, *size, **options)

    expected = rows_of_dispatch(1)[0][0]
    with mock.patch.object(torch.Tensor, "new_empty", scarce):
        rows, deeds = rows_of_dispatch(1)[0]
    assert full == [(6 + 4 * (ALIGNMENT - 1), 4)]
    assert torch.equal(rows, expected)
    assert deeds.count("scatter_rows") == 1


def test_a_bound_holds_for_every_routing():
    """One row in each block takes a whole multiple of the alignment."""
    bound = affordable_bound(NUM_EXPERTS, NUM_EXPERTS, ALIGNMENT, 1, 1, needs_grad=False)
    assert bound == NUM_EXPERTS * ALIGNMENT
    assert affordable_bound(0, NUM_EXPERTS, ALIGNMENT, 1, 1, needs_grad=False) == 0

"""The kernel ``choose_owners`` on the emulator, against the CPU's choice, which is compared with the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulated_scenes import Emulated
from emulator import is_available
from simulated_nodes import Rank

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.cpu.kernels.choose_owners import choose_owners as choose_on_cpu, count_divided
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables, choose_owners
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.owner_choice import CudaOwnerChoice
from fusco.cuda.stream_order import StreamOrder
from fusco.planner.owners import OwnerTables
from generator import random_of, random_places

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")

NUM_RANKS, NUM_EXPERTS, NUM_PLACES = 4, 9, 4


def alone(folder, program) -> Any:
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    layout = DeviceLayout(Topology((0,)), capacity, Settings())
    return Emulated(folder, order=3).world(layout, ExpertPlacement.contiguous(1, 1)).run(program)[0]


def tables_of(seed: int, *, has_shares: bool) -> list[OwnerTables]:
    given = random_places(NUM_RANKS, NUM_PLACES, NUM_EXPERTS, has_shares=has_shares, seed=seed)
    placement = ExpertPlacement.replicated(*given, num_experts=NUM_EXPERTS)
    return [OwnerTables.of(placement, rank, Topology.of_equal_nodes(NUM_RANKS, 2)) for rank in range(NUM_RANKS)]


def fill(on_device: DeviceOwnerTables, tables: OwnerTables) -> None:
    for name in ("expert_to_first", "owners", "expert_to_divided"):
        values = torch.from_numpy(getattr(tables, name))
        getattr(on_device, name)[: len(values)] = values


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("has_shares", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5, 300])  # no block, one, two
def test_the_kernel_chooses_as_the_cpu_does_also_after_other_tables(num_tokens, has_shares, dtype, folder):
    random = random_of("owners", num_tokens)
    # Some ids are none, some are invalid.
    ids = [torch.randint(-3, NUM_EXPERTS + 9, (num_tokens, 3), generator=random).to(dtype) for _ in range(NUM_RANKS)]
    on_device = DeviceOwnerTables.empty(NUM_EXPERTS, NUM_RANKS * NUM_PLACES, 1, torch.device("cpu"))

    for seed in range(3):
        world = tables_of(seed, has_shares=has_shares)
        fill(on_device, tables := world[1])
        bounds = of_device = None
        if has_shares:
            bounds = tables.divide_rows(np.stack([count_divided(*each) for each in zip(ids, world, strict=True)]))
            of_device = torch.from_numpy(bounds)

        def program(at: Rank, of_device: torch.Tensor | None = of_device) -> torch.Tensor:
            return choose_owners(at.context.launcher(at.stream), on_device, ids[1], of_device)

        seen = alone(folder, program)
        assert seen.dtype == dtype
        assert torch.equal(seen, choose_on_cpu(ids[1], tables, bounds))


@pytest.mark.parametrize("has_shares", [False, True])
def test_the_engines_choice_follows_each_placement(has_shares, folder):
    random = random_of("choice", has_shares)
    ids = torch.randint(-1, NUM_EXPERTS, (50, 3), generator=random)
    capacity = Capacity(max_tokens_per_rank=50, max_bytes_per_token=8, num_topk=3)
    layout = DeviceLayout(Topology((0,)), capacity, Settings())
    physical = ExpertPlacement.contiguous(NUM_RANKS * NUM_PLACES, 1)

    def program(at: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
        at.context.num_experts = NUM_EXPERTS
        choice = CudaOwnerChoice(at.context, StreamOrder(at.context.gpu, on_capture=lambda: None))
        pairs = []
        for seed in range(3):
            tables = tables_of(seed, has_shares=has_shares)[0]
            choice.place(tables)
            bounds = None
            if has_shares:
                counts = choice.count(ids).copy()
                assert counts.tolist() == count_divided(ids, tables).tolist()
                bounds = tables.divide_rows(np.stack([counts] * NUM_RANKS))
            assert choice.count_experts(ids).tolist() == torch.bincount(ids[ids >= 0], minlength=NUM_EXPERTS).tolist()
            pairs.append((choice.choose(ids, bounds), choose_on_cpu(ids, tables, bounds)))
        return pairs

    (pairs,) = Emulated(folder, order=4).world(layout, physical).run(program)
    for seen, expected in pairs:
        assert torch.equal(seen, expected)

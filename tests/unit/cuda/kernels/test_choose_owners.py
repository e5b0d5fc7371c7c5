"""The kernel ``choose_owners`` on the emulator, against the CPU's choice, which is compared with the twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_scenes import Emulated, alone
from emulator import is_available
from simulated_nodes import Rank

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.cpu.kernels.choose_owners import choose_owners as choose_on_cpu, count_experts
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables, choose_owners
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.owner_choice import CudaOwnerChoice
from fusco.cuda.stream_order import StreamOrder
from fusco.planner.owners import OwnerTables
from generator import random_of, random_places

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")

NUM_RANKS, NUM_EXPERTS, NUM_PLACES = 4, 9, 4
TOPOLOGY = Topology.of_equal_nodes(NUM_RANKS, 2)


def tables_of(seed: int, *, has_shares: bool, topology: Topology = TOPOLOGY) -> list[OwnerTables]:
    """Tables of all ranks, or as the last one or two are absent, which had experts that are lost."""
    given = random_places(NUM_RANKS, NUM_PLACES, NUM_EXPERTS, has_shares=has_shares, seed=seed)
    placement = ExpertPlacement.replicated(*given, num_experts=NUM_EXPERTS).without_ranks(range(4 - seed % 3, 4))
    return [OwnerTables.of(placement, rank, topology) for rank in range(NUM_RANKS)]


def fill(on_device: DeviceOwnerTables, tables: OwnerTables) -> None:
    for to, values in on_device.of_placement(tables):
        to.copy_(torch.from_numpy(values))


@pytest.mark.parametrize(  # no block, one, two
    ("num_tokens", "has_shares", "dtype"),
    [(0, True, torch.int64), (5, False, torch.int32), (300, False, torch.int64), (300, True, torch.int32)],
    ids=str,
)
def test_the_kernel_chooses_as_the_cpu_does_also_after_other_tables(num_tokens, has_shares, dtype, folder):
    random = random_of("owners", num_tokens)
    # Some ids are none, some are invalid.
    ids = [torch.randint(-3, NUM_EXPERTS + 9, (num_tokens, 3), generator=random).to(dtype) for _ in range(NUM_RANKS)]
    on_device = DeviceOwnerTables.empty(
        NUM_EXPERTS, NUM_RANKS * NUM_PLACES, 1, TOPOLOGY.rank_to_node, torch.device("cpu")
    )

    for seed in range(3):
        world = tables_of(seed, has_shares=has_shares)
        fill(on_device, tables := world[1])
        bounds = of_device = None
        if has_shares:
            bounds = tables.divide_rows(np.stack([count_experts(each, NUM_EXPERTS)[tables.divided] for each in ids]))
            of_device = torch.from_numpy(bounds)

        def program(at: Rank, of_device: torch.Tensor | None = of_device) -> torch.Tensor:
            return choose_owners(at.context.launcher(at.stream), on_device, ids[1], of_device)

        seen = alone(folder, program)
        assert seen.dtype == dtype
        assert torch.equal(seen, choose_on_cpu(ids[1], tables, bounds))
        lost = torch.from_numpy(np.flatnonzero(np.diff(tables.expert_to_first) == 0))
        assert seed < 2 or len(lost)
        assert (seen[torch.isin(ids[1], lost)] == -1).all()


@pytest.mark.parametrize("ranks_per_node", [NUM_RANKS, 2])
@pytest.mark.parametrize("has_shares", [False, True])
def test_the_engines_choice_follows_each_placement(has_shares, ranks_per_node, folder):
    random = random_of("choice", has_shares)
    ids = [torch.randint(-2, NUM_EXPERTS + 3, (tokens, 3), generator=random) for tokens in (50, 0, 7, 400)]
    capacity = Capacity(max_tokens_per_rank=400, max_bytes_per_token=8, num_topk=3)
    topology = Topology.of_equal_nodes(NUM_RANKS, ranks_per_node)
    layout = DeviceLayout(topology, capacity, Settings())
    physical = ExpertPlacement.contiguous(NUM_RANKS * NUM_PLACES, NUM_RANKS)

    def program(at: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
        at.context.num_experts = NUM_EXPERTS
        order = StreamOrder(at.context.gpu, on_capture=lambda: None)
        choice = CudaOwnerChoice(at.context, order, getattr(at.shuffle, "_network", None))
        pairs = []
        for seed in range(4):
            tables = tables_of(seed, has_shares=has_shares, topology=topology)[at.rank]
            choice.place(tables)
            mine, bounds, on_device = ids[(at.rank + seed) % NUM_RANKS], None, None
            if has_shares:
                counts = np.stack([count_experts(ids[(r + seed) % NUM_RANKS], NUM_EXPERTS) for r in range(NUM_RANKS)])
                bounds, on_device = tables.divide_rows(counts[:, tables.divided]), choice.divide(mine)
            pairs.append((choice.choose(mine, on_device), choose_on_cpu(mine, tables, bounds)))
        return pairs

    for pairs in Emulated(folder, order=2).world(layout, physical).run(program):
        for seen, expected in pairs:
            assert torch.equal(seen, expected)

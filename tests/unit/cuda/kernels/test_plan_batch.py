"""The kernel ``plan_batch`` on the emulator: plans and tables of owners are those of the CPU, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_scenes import alone
from emulator import is_available
from simulated_nodes import Rank

from fusco import ExpertPlacement, Topology
from fusco.api.owners import _quotas as quotas_of
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables
from fusco.cuda.kernels.divide_rows import divide_rows
from fusco.cuda.kernels.plan_batch import DeviceBatches, plan_batch
from fusco.placement import Balance, BatchPlan, plan_batch as plan_on_cpu
from fusco.planner.owners import OwnerTables

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")
CPU = torch.device("cpu")


def counts_of(num_ranks: int, num_experts: int, exponent: float, seed: int) -> np.ndarray:
    """Rows (R, E) of a popularity by Zipf's law; many are equal, so ties are frequent."""
    random = np.random.default_rng(seed)
    popularity = 1 / (1 + random.permutation(num_experts)) ** exponent
    return random.poisson(3 * num_experts * popularity / popularity.sum(), (num_ranks, num_experts))


class Planned:
    """Plans of one placement on an emulated device, of rank ``rank``."""

    def __init__(self, placement: ExpertPlacement, topology: Topology, balance: Balance, rank: int, folder) -> None:
        sizes = (placement.num_experts, placement.physical.num_experts, rank, topology.rank_to_node)
        self.tables = DeviceOwnerTables.empty(*sizes, CPU)
        self.batches = DeviceBatches.of(placement, balance, CPU)
        self._folder = folder
        self._ranks_per_node = topology.ranks_per_node

    def plan(self, counts: np.ndarray, absent: int = 0) -> BatchPlan:
        self.tables.counts.copy_(torch.from_numpy(counts))

        def program(at: Rank) -> BatchPlan:
            at.arena.begin_again(absent)
            launcher = at.context.launcher(at.stream)
            result = plan_batch(launcher, self.batches, self.tables, self._ranks_per_node)
            divide_rows(launcher, self.tables, has_quotas=True)
            at.machine_is_idle()
            return self.batches.plan_of(result)

        return alone(self._folder, program)


def check(seen: BatchPlan, expected: BatchPlan) -> None:
    for name in ("rows_per_expert", "experts", "ranks", "rows", "loads", "loads_before"):
        assert getattr(seen, name).tolist() == getattr(expected, name).tolist(), name
    assert seen.limit == expected.limit


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "num_experts", "balance"),
    [
        (4, 4, 8, Balance(1, tolerance=0.0)),
        (4, 2, 12, Balance(2)),
        (8, 4, 16, Balance(1)),  # places do not suffice: all ways and caps
        (8, 2, 32, Balance(2, rows_per_copy=7.3)),
        (40, 8, 80, Balance(2)),  # more ranks than lanes
        (3, 3, 3, Balance(0)),
        (1, 1, 4, Balance(1)),
    ],
    ids=str,
)
def test_plans_and_owners_are_those_of_the_cpu(num_ranks, ranks_per_node, num_experts, balance, folder):
    topology = Topology.of_equal_nodes(num_ranks, ranks_per_node)
    homes = np.random.default_rng(num_experts).permutation(num_experts) % num_ranks
    placement = ExpertPlacement.explicit(homes.tolist(), num_ranks)
    placement = placement.in_places(num_experts // num_ranks + balance.spare_places)
    rank = num_ranks // 2
    device, num_copies, limits = Planned(placement, topology, balance, rank, folder), 0, set()
    for seed, exponent in enumerate((0.6, 1.2, 2.5)):
        counts = counts_of(num_ranks, num_experts, exponent, seed)
        expected = plan_on_cpu(counts.sum(axis=0), homes, num_ranks, balance, ranks_per_node)
        check(device.plan(counts), expected)
        tables = OwnerTables.of(placement, rank, topology, (expected.experts, expected.ranks))
        bounds = tables.divide_rows(counts[:, tables.divided], quotas_of(expected, tables))
        for to, values in device.tables.of_placement(replace(tables, units=np.zeros(0))):
            assert to.tolist() == values.tolist()
        is_divided = np.repeat(tables.expert_to_divided >= 0, np.diff(tables.expert_to_first))
        assert device.tables.bounds.numpy()[: len(bounds)][is_divided].tolist() == bounds[is_divided].tolist()
        num_copies, limits = num_copies + len(expected.experts), limits | {expected.limit}
    assert bool(num_copies) == (balance.spare_places > 0 and num_ranks > 1)


@pytest.mark.parametrize("absent", [0, 2, 4])
def test_once_a_rank_is_gone_a_graph_plans_for_those_that_are_left(absent, folder):
    num_ranks, num_experts, balance = 5, 15, Balance(2, tolerance=0.0)
    homes, num_copies = np.random.default_rng(1).permutation(num_experts) % num_ranks, 0
    placement = ExpertPlacement.explicit(homes.tolist(), num_ranks).in_places(num_experts // num_ranks + 2)
    device = Planned(placement, Topology((0,) * num_ranks), balance, (absent + 1) % num_ranks, folder)
    left = np.array([rank for rank in range(num_ranks) if rank != absent])
    (kept,) = np.nonzero(homes != absent)  # experts
    for seed, exponent in enumerate((0.6, 1.2, 2.5)):
        counts = counts_of(num_ranks, num_experts, exponent, seed)
        counts[absent] = 0  # as share_counts counts them
        seen = device.plan(counts, 1 << absent)
        rows = counts.sum(axis=0)
        expected = plan_on_cpu(rows[kept], np.searchsorted(left, homes[kept]), len(left), balance)
        copies = kept[expected.experts].tolist(), left[expected.ranks].tolist(), expected.rows.tolist()
        assert (seen.experts.tolist(), seen.ranks.tolist(), seen.rows.tolist()) == copies
        assert seen.rows_per_expert.tolist() == np.where(homes == absent, 0, rows).tolist()
        num_copies += len(seen.experts)
    assert num_copies


def test_a_batch_without_rows_has_no_copies(folder):
    placement = ExpertPlacement.contiguous(4, 2).in_places(3)
    device = Planned(placement, Topology((0, 0)), Balance(1), 0, folder)
    plan = device.plan(np.zeros((2, 4), np.int64))
    assert (len(plan.experts), plan.limit) == (0, "")

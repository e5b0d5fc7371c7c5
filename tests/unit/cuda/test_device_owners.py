"""Owners on CUDA without a GPU: the device divides rows by shares, so that can be captured, and plans batches."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from repeated_rig import Node

from fusco import ExpertPlacement, Topology
from fusco.api.owners import Owners, _quotas as quotas_of
from fusco.bench.host.null_device import NullDeviceValidator
from fusco.cpu.kernels.choose_owners import choose_owners as choose_on_cpu, count_experts
from fusco.placement import Balance, plan_batch
from fusco.planner.owners import OwnerTables
from reference.choose_owners import choose_owners

EXPERTS, SHARES = [[0, 1, 2], [0, 3, 1]], [[0.25, 1.0, 1.0], [0.75, 1.0, 0.5]]  # of the rig's six places
IDS = [torch.tensor([[0, 1], [1, 0], [0, 3], [-1, 0]]), torch.tensor([[0, 2], [1, 0]])]
SHAPES = pytest.mark.parametrize("topology", [Topology((0, 0)), Topology((0, 1))], ids=str)


def owners_of(comm, placement: ExpertPlacement) -> Owners:
    comm._engine._context.num_experts = placement.num_experts
    # The device is that of the memory which plays it.
    validator = replace(comm._validator, caller_placement=placement, device=torch.device("cpu"))
    return Owners(comm._session, comm._engine, validator)


@SHAPES
def test_a_captured_dispatch_divides_rows_by_shares(topology, folder):
    expected = choose_owners(IDS, EXPERTS, SHARES, topology.rank_to_node)

    def program(comm, _other, _library):
        owners = owners_of(comm, ExpertPlacement.replicated(EXPERTS, SHARES))
        with pytest.raises(ValueError, match="plan_batch waits on the host, so it cannot be captured"):
            owners.plan_batch(IDS[comm.rank], Balance(0))
        return [owners.choose(IDS[comm.rank]) for _ in range(3)]

    with mock.patch.object(NullDeviceValidator, "is_capturing", new=True):
        found = Node(topology=topology, folder=folder).run(program)
    for rank, chosen in found.items():
        assert [each.tolist() for each in chosen] == [expected[rank].tolist()] * 3


@SHAPES
def test_the_dispatch_after_a_plan_follows_it_and_the_next_one_does_not(topology, folder):
    placement, balance = ExpertPlacement.contiguous(4, 2).in_places(3), Balance(1, tolerance=0.0)
    counts = np.stack([count_experts(ids, 4) for ids in IDS])
    expected = plan_batch(counts.sum(axis=0), [0, 0, 1, 1], 2, balance, topology.ranks_per_node)
    assert len(expected.experts)

    def program(comm, _other, _library):
        owners = owners_of(comm, placement)
        for _ in range(2):
            plan = owners.plan_batch(IDS[comm.rank], balance)
            assert [plan.experts.tolist(), plan.ranks.tolist(), plan.rows.tolist()] == [
                expected.experts.tolist(),
                expected.ranks.tolist(),
                expected.rows.tolist(),
            ]
            assert plan.loads.tolist() == expected.loads.tolist()
            planned, usual = owners.choose(IDS[comm.rank]), owners.choose(IDS[comm.rank])
        return planned, usual

    for rank, (planned, usual) in Node(topology=topology, folder=folder).run(program).items():
        tables = OwnerTables.of(placement, rank, topology, (expected.experts, expected.ranks))
        bounds = tables.divide_rows(counts[:, tables.divided], quotas_of(expected, tables))
        assert planned.tolist() == choose_on_cpu(IDS[rank], tables, bounds).tolist()
        assert usual.tolist() == choose_on_cpu(IDS[rank], OwnerTables.of(placement, rank, topology)).tolist()


def test_replays_of_a_captured_plan_follow_another_placement(folder):
    """A replay reads the tables of its capture, in the same memory; what it could not plan for is refused."""
    balance = Balance(1, tolerance=0.0)
    placement = ExpertPlacement.contiguous(4, 2).in_places(3)
    other = ExpertPlacement.replicated([[3, -1, 0], [-1, 1, 2]], num_experts=4)
    ids = [torch.tensor([[0, 3], [3, 0], [0, 3]]), torch.tensor([[3, 2], [0, 1]])]

    def program(comm, _other, _library):
        owners = owners_of(comm, placement)
        owners.plan_batch(ids[comm.rank], balance)
        captured = owners.plan_on_device(ids[comm.rank], balance)
        owners._choice._captured.append(captured.batches)  # as in a capture
        tables = {name: getattr(captured.batches, name) for name in ("order", "first", "places", "empty_places")}
        with mock.patch.object(comm._engine, "num_live_graphs", return_value=1):
            with pytest.raises(ValueError, match=r"a graph has captured a plan with Balance.* has 0 empty"):
                owners.place(ExpertPlacement.replicated([[0, 1, 2], [0, 3, -1]]))
            owners.place(other)
        again = owners.plan_on_device(ids[comm.rank], balance)
        assert all(getattr(again.batches, name) is table for name, table in tables.items())
        return again.wait()

    counts = np.stack([count_experts(each, 4) for each in ids]).sum(axis=0)
    expected = plan_batch(counts, other.expert_to_rank, 2, balance)
    assert len(expected.experts)
    for plan in Node(folder=folder).run(program).values():
        for name in ("experts", "ranks", "rows", "loads"):
            assert getattr(plan, name).tolist() == getattr(expected, name).tolist()


def test_more_experts_may_have_several_owners_if_others_are_lost(folder):
    placement = ExpertPlacement.replicated([[0, 1, 2], [0, 1, 2]], num_experts=6, may_lose=True)
    expected = choose_owners(IDS, placement.rank_to_experts, None, [0, 0])

    def program(comm, _other, _library):
        return owners_of(comm, placement).choose(IDS[comm.rank])

    for rank, chosen in Node(folder=folder).run(program).items():
        assert chosen.tolist() == expected[rank].masked_fill(IDS[rank] == 3, -1).tolist()


def test_what_was_captured_chooses_owners_that_are_left(folder):
    placement = ExpertPlacement.replicated(EXPERTS)

    def program(comm, _other, _library):
        former = owners_of(comm, placement)
        before = former.choose(IDS[comm.rank])
        left = replace(former._validator, caller_placement=placement.without_ranks([1]))
        Owners(comm._session, comm._engine, left, [former])
        return before, former.choose(IDS[comm.rank])

    for rank, (before, after) in Node(folder=folder).run(program).items():
        assert before.tolist() == choose_owners(IDS, EXPERTS, None, [0, 0])[rank].tolist()
        assert after.tolist() == IDS[rank].masked_fill(IDS[rank] == 3, -1).tolist()  # rank 0 has the others

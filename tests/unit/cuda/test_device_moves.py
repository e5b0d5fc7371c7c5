"""Moves of experts on CUDA without a GPU: what a rank sends is its experts, within a node and between nodes."""

from __future__ import annotations

import threading
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from repeated_rig import LIMIT_S, NUM_EXPERTS, Node
from test_device_owners import owners_of

from comparison import assert_same_bits
from fusco import ExpertPlacement, Topology
from fusco.api.owners import Owners
from fusco.bench.host.null_device import NullDeviceValidator
from fusco.placement import Balance, plan_batch
from generator import any_bits, values

CPU = torch.device("cpu")
KINDS = [(torch.float32, (3, 5)), (torch.uint8, (7,)), (torch.bfloat16, (40, 33))]


def experts(numbers: list[int]) -> list[torch.Tensor]:
    """Weights (P, ...) of these experts, the same on every rank."""
    return [
        torch.stack([any_bits((1, *shape), dtype, "expert", number, i)[0] for number in numbers])
        for i, (dtype, shape) in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 2), (2, 1), (3, 1), (1, 3)])
def test_experts_arrive_where_they_are_placed(num_nodes, ranks_per_node, folder):
    num_ranks = num_nodes * ranks_per_node
    have_all_ended = threading.Barrier(num_ranks)
    old = np.arange(NUM_EXPERTS).reshape(num_ranks, -1)
    new = np.roll(old, 1)

    def program(comm, _other, _library):
        comm._validator = replace(
            comm._validator, device=torch.device("cpu")
        )  # that of the memory which plays the device's
        weights = experts(old[comm.rank].tolist())
        comm.move_experts(weights, old, new)
        have_all_ended.wait(LIMIT_S)  # a rank that leaves would end what others have under way
        for found, expected in zip(weights, experts(new[comm.rank].tolist()), strict=True):
            assert_same_bits(found, expected, f"rank {comm.rank}")

    Node(topology=Topology.of_equal_nodes(num_ranks, ranks_per_node), folder=folder).run(program)


class Capturing(NullDeviceValidator):
    """Validator of calls that a graph captures."""

    is_capturing = True


def capture(comm) -> None:
    """Let further calls be captured."""
    known = comm._owners._validator
    validator = Capturing(**{field.name: getattr(known, field.name) for field in fields(known) if field.init})
    comm._validator = comm._owners._validator = validator


def test_what_the_device_plans_is_copied_without_the_host(folder):
    """As captured: the host never waits for a plan, which differs from call to call."""
    num_ranks, balance = 2, Balance(1, tolerance=0.0)
    placement = ExpertPlacement.contiguous(4, num_ranks).in_places(3)
    ids = [torch.tensor([[0, 1], [0, 2], [1, 0]]), torch.tensor([[3, 2], [3, 0], [3, 1]])]
    batches = [[ids[0], ids[0]], [ids[1], ids[1]], [ids[0][:0], ids[1][:0]]]

    def program(comm, _other, _library):
        owners = comm._owners = owners_of(comm, placement)
        comm._validator = owners._validator
        assert comm.plan_batch(batches[0][comm.rank], balance).experts.tolist() == [0]
        mine = list(placement.rank_to_experts[comm.rank])[:2]
        whole = values((4, 3, 5), torch.float32, "weights")
        weights, scales = whole[mine].requires_grad_(), whole[mine].to(torch.uint8)
        capture(comm)
        for batch in batches:
            plan = comm.plan_batch_on_device(batch[comm.rank], balance)
            spares, of_scales = comm.prefetch_experts([weights, scales], plan, 1)
            weights.grad = None
            torch.autograd.backward([spares], [torch.full_like(spares, comm.rank + 1.0)])
            known = plan.wait()
            counts = torch.cat(batch).flatten().bincount(minlength=4)
            expected = plan_batch(counts, placement.expert_to_rank, num_ranks, balance)
            for name in ("experts", "ranks", "rows", "loads"):
                assert getattr(known, name).tolist() == getattr(expected, name).tolist()
            copies = known.experts[known.ranks == comm.rank].tolist()
            assert_same_bits(spares[: len(copies)], whole[copies], "copies")
            assert_same_bits(of_scales[: len(copies)], whole[copies].to(torch.uint8), "copies of scales")
            assert not spares[len(copies) :].any()
            sums = torch.zeros_like(weights)
            for rank, expert in zip(known.ranks.tolist(), known.experts.tolist(), strict=True):
                if expert in mine:
                    sums[mine.index(expert)] += rank + 1.0
            assert_same_bits(weights.grad, sums, "gradients")
        with pytest.raises(ValueError, match="the plan has 1 spare places, got spare_places=2"):
            comm.prefetch_experts([weights], plan, 2)

    Node(folder=folder).run(program)


def test_plans_on_the_device_that_cannot_be(folder):
    placement, balance = ExpertPlacement.contiguous(4, 2).in_places(3), Balance(1)
    ids = torch.tensor([[0, 1]])

    def program(comm, _other, _library):
        with pytest.raises(ValueError, match="on CUDA whose experts have places; this one is on cpu"):
            Owners(comm._session, comm._engine, replace(comm._validator, device=CPU)).plan_on_device(ids, balance)
        owners = comm._owners = owners_of(comm, placement)
        comm._validator = owners._validator
        plan = comm.plan_batch_on_device(ids, Balance(1, tolerance=0.5))
        capture(comm)
        with pytest.raises(ValueError, match=r"plan a batch with Balance\(.*\) once before the capture"):
            comm.plan_batch_on_device(ids, balance)
        with pytest.raises(ValueError, match="between 2 nodes the host gives NCCL the sizes of messages"):
            comm.prefetch_experts([torch.zeros(2, 3)], plan, 1)

    Node(topology=Topology.of_equal_nodes(2, 1), folder=folder).run(program)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 2), (2, 1)])
def test_copies_of_a_batch_and_their_gradients(num_nodes, ranks_per_node, folder):
    num_ranks = num_nodes * ranks_per_node
    have_all_ended = threading.Barrier(num_ranks)
    rows = np.array([90, 1, 1, 1, 1, 1])

    def program(comm, _other, _library):
        comm._validator = replace(
            comm._validator, device=torch.device("cpu")
        )  # that of the memory which plays the device's
        placement = comm.placement
        plan = plan_batch(rows, placement.expert_to_rank, num_ranks, Balance(1, tolerance=0))
        assert len(plan.ranks), "an expert has a copy"
        mine = list(placement.rank_to_experts[comm.rank])
        weights = values((NUM_EXPERTS, 4, 3), torch.float32, "weights")[mine].requires_grad_()
        (spares,) = comm.prefetch_experts([weights], plan, 1)
        copies = plan.experts[plan.ranks == comm.rank].tolist()
        assert_same_bits(spares[: len(copies)], values((NUM_EXPERTS, 4, 3), torch.float32, "weights")[copies], "copies")
        torch.autograd.backward([spares], [torch.full_like(spares, comm.rank + 1.0)])
        have_all_ended.wait(LIMIT_S)
        sums = torch.zeros_like(weights)
        for rank, expert in zip(plan.ranks.tolist(), plan.experts.tolist(), strict=True):
            if expert in mine:
                sums[mine.index(expert)] += rank + 1.0
        assert_same_bits(weights.grad, sums, "gradients")

    Node(topology=Topology.of_equal_nodes(num_ranks, ranks_per_node), folder=folder).run(program)

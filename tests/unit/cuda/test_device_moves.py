"""Moves of experts on CUDA without a GPU: what a rank sends is its experts, within a node and between nodes."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from repeated_rig import LIMIT_S, NUM_EXPERTS, Node

from comparison import assert_same_bits
from fusco import Topology
from fusco.placement import Balance, plan_batch
from generator import any_bits, values

KINDS = [(torch.float32, (3, 5)), (torch.uint8, (7,)), (torch.bfloat16, (40, 33))]


def experts(numbers: list[int]) -> list[torch.Tensor]:
    """Weights (P, ...) of these experts, the same on every rank."""
    return [
        torch.stack([any_bits((1, *shape), dtype, "expert", number, i)[0] for number in numbers])
        for i, (dtype, shape) in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 2), (2, 1), (3, 1), (1, 3)])
def test_experts_arrive_where_they_are_placed(num_nodes, ranks_per_node):
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

    Node(topology=Topology.of_equal_nodes(num_ranks, ranks_per_node)).run(program)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 2), (2, 1)])
def test_copies_of_a_batch_and_their_gradients(num_nodes, ranks_per_node):
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

    Node(topology=Topology.of_equal_nodes(num_ranks, ranks_per_node)).run(program)

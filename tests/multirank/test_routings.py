"""Routings of all kinds on all topologies follow the specification, for every balancer and slice size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rank_setup import Setup
from routing_jobs import bytes_sent_with_rails, check_routings, check_routings_on_hosts

from fusco import BALANCERS, Settings
from generator import KINDS

pytestmark = pytest.mark.multirank

# Nodes, ranks of each, and its setups: each is on three topologies.
TOPOLOGIES = [
    (3, 2, slice(0, None, 2)),
    (2, 2, slice(1, None, 2)),
    (4, 2, slice(0, None, 4)),
    (1, 4, slice(1, None, 4)),
]
TOPOLOGIES += [(2, 1, slice(2, None, 4)), (1, 1, slice(3, None, 4))]
TINY, MEDIUM, HUGE = 1, 200, 1 << 20  # the last one takes all rows of a case at once


def setup_of(ranks_per_node, balancer="lanes", slice_bytes=MEDIUM, ring_depth=4, **rest):
    settings = Settings(timeout_s=60.0, slice_bytes=slice_bytes, ring_depth=ring_depth)
    # Rows of 5 float32 in slots made for 64 bytes: with tiny slices six rows make one.
    return Setup(ranks_per_node=ranks_per_node, balancer=balancer, settings=settings, max_bytes_per_token=64, **rest)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "chosen"), TOPOLOGIES)
def test_every_kind_of_routing_with_every_balancer_slice_and_ring_size(
    world, world_of, num_nodes, ranks_per_node, chosen
):
    num_ranks = num_nodes * ranks_per_node
    setups = [setup_of(ranks_per_node, balancer, TINY, 2) for balancer in BALANCERS]
    setups += [setup_of(ranks_per_node, "scattered", slice_bytes, 2) for slice_bytes in (TINY, MEDIUM)]
    setups += [setup_of(ranks_per_node, ring_depth=7), setup_of(ranks_per_node, slice_bytes=HUGE)]
    staged = dataclasses.replace(setups[0].settings, slice_order="staged")
    setups = [*setups, dataclasses.replace(setups[0], settings=staged)][chosen]
    seeds = range(num_ranks, num_ranks + len(KINDS))
    outputs = [world.run(check_routings, num_ranks, setup, torch.float32, seeds) for setup in setups]
    if world_of == "cuda-nodes":
        # A forwarder adds its local terms of a sum one by one: the bits depend on which rank forwards.
        rows = [[[rows for rows, _ in of_rank] for of_rank in output] for output in outputs]
        assert all(output == rows[0] for output in rows[1:])
        lanes = [output for output, setup in zip(outputs, setups, strict=True) if setup.balancer == setups[0].balancer]
        assert all(output == lanes[0] for output in lanes)
    else:
        assert all(output == outputs[0] for output in outputs[1:])


@pytest.mark.cuda_only
def test_carriers_on_nodes_of_four_ranks(world, world_of):
    seeds = range(500, 500 + len(KINDS))
    balancers = ("send-and-receive", "lanes", "scattered")
    outputs = [world.run(check_routings, 8, setup_of(4, balancer), torch.float32, seeds) for balancer in balancers]
    rows = [[[rows for rows, _ in of_rank] for of_rank in output] for output in outputs]
    assert rows[1] == rows[2] == rows[0]
    if world_of == "cuda":
        assert outputs[1] == outputs[2] == outputs[0]  # on one node no row is carried


def test_a_rank_with_two_of_three_rails_takes_twice_the_share(world, world_of):
    setup = setup_of(2, max_tokens=200)  # too many to be attached to records
    plain, uneven = (world.run(bytes_sent_with_rails, 4, setup, num_rails) for num_rails in (2, 3))
    for (first, second), before in zip(zip(*uneven[:2], strict=True), zip(*plain[:2], strict=True), strict=True):
        assert first + second == sum(before)
        assert before[0] == pytest.approx(before[1], rel=0.1)
        assert first == pytest.approx(2 * second, rel=0.03)
    assert bool(sum(plain[0])) == (world_of != "cuda")


def test_ranks_that_come_late_change_nothing(world):
    setup, seeds = setup_of(2, slice_bytes=TINY, ring_depth=2), range(100, 100 + len(KINDS))
    prompt, late = (world.run(check_routings, 6, setup, torch.float32, seeds, pause_ms) for pause_ms in (0, 10))
    assert prompt == late


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.float64, None),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_sums_of_every_dtype_stay_within_their_rounding(world, dtype, wire_dtype):
    setup = setup_of(2, slice_bytes=TINY)
    settings = dataclasses.replace(setup.settings, wire_dtype=wire_dtype)
    world.run(check_routings, 4, dataclasses.replace(setup, settings=settings), dtype, range(200, 200 + len(KINDS)))


@pytest.mark.parametrize(
    ("expert_placement", "ranks_per_node"),
    [
        ((3, 3, 3, 0, 0, 3, 3, 0, 3, 3), 1),  # ranks 1 and 2 own nothing
        ((3, 3, 3, 0, 0, 3, 3, 0, 3, 3), 2),
        ((2,) * 5, 2),  # one rank owns all
        ((0, 1, 2, 3, 2, 1, 0), 2),  # uneven and out of order
        ((0, 1, 2, 3, 2, 1, 0), 4),
        ((1,), 1),
    ],
    ids=str,
)
def test_uneven_placements(world, expert_placement, ranks_per_node):
    sizes = {"num_experts": len(expert_placement), "num_topk": min(8, len(expert_placement))}
    setup = setup_of(ranks_per_node, **sizes, expert_placement=expert_placement)
    world.run(check_routings, 4, setup, torch.float32, range(300, 300 + len(KINDS)))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("hosts", "rank_to_node"),
    [("aaaa", (0, 0, 0, 0)), ("abab", (0, 1, 0, 1)), ("zaaz", (0, 1, 1, 0)), ("abcacb", (0, 1, 2, 0, 2, 1))],
)
def test_nodes_are_derived_from_hosts_in_any_order(world, hosts, rank_to_node):
    setup = setup_of(None, slice_bytes=TINY)
    seeds = range(400, 400 + len(KINDS))
    found = world.run(check_routings_on_hosts, len(hosts), setup, torch.float32, seeds, list(hosts))
    assert found == [rank_to_node] * len(hosts)

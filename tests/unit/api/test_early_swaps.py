"""Early swaps of moves, all ranks in one process: new experts get to their places, old ones come back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fusco.api.early_swaps import EarlySwaps
from fusco.api.move_task import RankTransfers
from fusco.api.placement_move import PlacementMove
from fusco.core.topology import Topology
from fusco.cpu.kernels.swap_memory import swap_memory
from fusco.placement.moves import MoveSteps, even_steps
from generator import any_bits

TOPOLOGY, NUM_EXPERTS, PLACES = Topology.of_equal_nodes(4, 2), 8, 3
SHAPES = (700,), (3, 5)


def in_places(experts):
    """Return two tensors (places, ...), whose bits say which expert a place has; an empty one has those of -1."""
    return [
        torch.stack([any_bits((1, *shape), torch.uint8, int(expert), i)[0] for expert in experts])
        for i, shape in enumerate(SHAPES)
    ]


def random_placements(seed):
    """Return two placements in which some experts have several places, and some places none."""
    random = np.random.default_rng(seed)
    copies = random.integers(0, NUM_EXPERTS, 4 * PLACES - NUM_EXPERTS - 2)
    of_all = [*range(NUM_EXPERTS), *copies, -1, -1]
    return [random.permutation(of_all).reshape(4, PLACES) for _ in range(2)]


class World:
    """Ranks that move experts by turns."""

    def __init__(self, seed, placements=None):
        self.random = np.random.default_rng(seed)
        self.old, self.new = placements or random_placements(seed)
        self.weights = [in_places(experts) for experts in self.old]
        self.moves = [
            PlacementMove.of((self.old, self.new), TOPOLOGY, rank, self.weights[rank], None) for rank in range(4)
        ]
        steps = MoveSteps(self.moves[0].plan, even_steps(self.moves[0].plan, 400))
        self.transfers = [
            RankTransfers(steps, rank, move.read, lambda size: torch.empty(size, dtype=torch.uint8))
            for rank, move in enumerate(self.moves)
        ]
        self.num_steps = steps.num_steps
        self.swaps = [EarlySwaps(*each) for each in zip(self.moves, self.transfers, strict=True)]
        self.work = [each.advance() for each in self.swaps]

    def swap(self, most):
        """Let each rank swap at most so many slices; return how many there were."""
        return sum(sum(itertools.takewhile(bool, itertools.islice(work, most))) for work in self.work)

    def exchange(self, step):
        """Move the bytes of a step, with swaps before they are sent and before they are recorded."""
        requests = [transfers.request(step) for transfers in self.transfers]
        counts = self.transfers[0].counts(step)
        assert counts == [tuple(request.counts) for request in requests]
        self.swap(int(self.random.integers(3)))
        sent = [torch.cat([*request.pieces, request.output[:0]]).split(request.send_rows) for request in requests]
        for rank, request in enumerate(requests):
            request.output.copy_(torch.cat([of_rank[rank] for of_rank in sent]))
        for transfers, request in zip(self.transfers, requests, strict=True):
            transfers.end(step, request)


@pytest.mark.parametrize("seed", range(40))
def test_experts_are_in_their_places_or_back(seed):
    world, is_undone = World(seed), seed % 2
    last = int(world.random.integers(world.num_steps)) if is_undone else world.num_steps
    for step in range(last):
        world.exchange(step)
        world.swap(int(world.random.integers(4)))
    for swaps in world.swaps:
        swaps.undo() if is_undone else swaps.put()
        swaps.undo()  # does nothing
    for rank, weights in enumerate(world.weights):
        expected = in_places(world.old[rank])
        if not is_undone:
            kept = np.where(world.new[rank] < 0, world.old[rank], world.new[rank])
            expected = in_places(kept)
        for found, bits in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, bits, rtol=0, atol=0)


@pytest.mark.parametrize("new", [[[6, 7], [0, 1], [2, 3], [4, 5]], [[4, 5], [4, 6], [0, 1], [2, 3]]])
def test_nothing_is_left_where_every_expert_changes_its_rank(new):
    """Not even of expert 4 of the second case, which a rank passes on."""
    world = World(0, (np.arange(NUM_EXPERTS).reshape(4, 2), np.array(new)))
    for step in range(world.num_steps):
        world.exchange(step)
    world.swap(1000)
    for rank, weights in enumerate(world.weights):
        for found, bits in zip(weights, in_places(world.new[rank]), strict=True):
            torch.testing.assert_close(found, bits, rtol=0, atol=0)


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4097])
def test_swaps_at_any_address(num_bytes):
    memory = torch.arange(2 * num_bytes + 5).to(torch.uint8)
    before, num_swapped = memory.clone(), np.array([2])
    first, second = slice(1, 1 + num_bytes), slice(num_bytes + 4, 2 * num_bytes + 4)
    swap_memory(memory[first], memory[second], num_swapped)
    assert num_swapped[0] == num_bytes + 2
    before[first], before[second] = before[second].clone(), before[first].clone()
    assert torch.equal(memory, before)

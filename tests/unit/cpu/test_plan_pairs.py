"""``plan_pairs`` and ``select_tokens`` against the planner's functions in plain PyTorch."""

import pytest
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.kernels.select_tokens import select_tokens
from fusco.planner.distribution import NodeRouting, distribute, mark_local_ranks
from fusco.planner.forwarding import plan_forwarding
from generator import number_of, random_of

TOPOLOGY = Topology((0, 1, 0, 1))
NODE_0 = (0, -1, 1, -1)  # local ranks


def test_by_hand():
    routing = NodeRouting(torch.tensor([[1, 0], [1, 2], [0, -1]], dtype=torch.int32), None, (0, 2, 3))
    placement = ExpertPlacement.contiguous(num_experts=4, world_size=2)
    pairs = plan_pairs(routing, placement, rank=0, rank_to_local=(0, 1))
    assert pairs.distribution.pair_to_row.tolist() == [0, 0, 1, 2]
    assert pairs.distribution.pair_to_k.tolist() == [0, 1, 0, 0]
    assert pairs.distribution.pair_to_slot.tolist() == [2, 0, 3, 1]
    assert pairs.row_to_first_pair.tolist() == [0, 2, 3, 4]
    assert pairs.row_to_locals.int().tolist() == [[1, 0], [1, 1], [1, 0]]


@pytest.mark.parametrize("static_rows", [None, 0, 5, 1000])
@pytest.mark.parametrize("alignment", [1, 4])
def test_random_routing(alignment, static_rows):
    for seed in range(20):
        num_experts, num_topk = number_of(1, 9, seed, "experts"), number_of(0, 4, seed, "topk")
        placement = ExpertPlacement.explicit([number_of(0, 3, seed, e) for e in range(num_experts)], world_size=4)
        shape = (number_of(0, 12, seed, "rows"), num_topk)
        ids = torch.randint(-1, num_experts, shape, generator=random_of(seed, "ids"), dtype=torch.int32)
        routing = NodeRouting(ids, None, (0, 0, 0, 0, len(ids)))
        expected = distribute(routing, placement, 2, alignment, static_rows)
        pairs = plan_pairs(routing, placement, 2, NODE_0, alignment, static_rows)
        for name, value in vars(expected).items():
            ours = getattr(pairs.distribution, name)
            assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value, name
        rows = torch.arange(len(ids) + 1)
        assert torch.equal(pairs.row_to_first_pair, torch.searchsorted(expected.pair_to_row, rows))
        assert torch.equal(pairs.row_to_locals, mark_local_ranks(routing, placement, TOPOLOGY, node=0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tokens_of_nodes(dtype):
    for seed in range(20):
        num_experts = number_of(1, 9, seed, "experts")
        placement = ExpertPlacement.explicit([number_of(0, 3, seed, e) for e in range(num_experts)], world_size=4)
        shape = (number_of(0, 12, seed, "tokens"), number_of(0, 4, seed, "topk"))
        ids = torch.randint(-1, num_experts, shape, generator=random_of(seed, "ids"), dtype=dtype)
        ours, expected = (plan(ids, placement, TOPOLOGY).node_to_tokens for plan in (select_tokens, plan_forwarding))
        assert [tokens.tolist() for tokens in ours] == [tokens.tolist() for tokens in expected]

"""The kernel ``plan_forwarding`` against its twin, on one GPU."""

import pytest
import torch

from comparison import assert_same_bits
from fusco.cuda.kernels.plan_forwarding import plan_forwarding as plan_on_device
from fusco.reference.plan_forwarding import plan_forwarding
from generator import KINDS, Case


def compare(one, topk_idx, expert_to_node, num_nodes, own_node):
    launcher = one.comm._engine._context.launcher(torch.cuda.current_stream())
    summary = torch.full((num_nodes + 2,), -7, dtype=torch.int64).pin_memory()
    made = plan_on_device(launcher, topk_idx.to(one.device), expert_to_node.int().to(one.device), own_node, summary)
    torch.cuda.synchronize()
    table = torch.cat([expert_to_node, torch.tensor([-1])])
    expected, expected_summary = plan_forwarding(topk_idx, table, num_nodes, own_node)
    assert_same_bits(summary.clone(), expected_summary, "summary")
    assert_same_bits(made.token_to_place.cpu(), expected.token_to_place, "token_to_place")
    for node, num_tokens in enumerate(expected_summary[:num_nodes].tolist()):
        seen, twin = made.node_to_tokens.cpu()[node, :num_tokens], expected.node_to_tokens[node, :num_tokens]
        assert_same_bits(seen.contiguous(), twin.contiguous(), f"tokens for node {node}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_nodes", "num_topk", "max_tokens"), [(2, 8, 40), (3, 1, 3000), (5, 32, 1024), (64, 4, 1025)]
)
def test_every_kind_of_routing(one, num_nodes, num_topk, max_tokens, dtype):
    for seed, kind in enumerate(KINDS):
        case = Case(kind=kind, seed=seed, world_size=1, num_experts=96, num_topk=num_topk, max_tokens=max_tokens)
        expert_to_node = torch.arange(96) * 7 % num_nodes
        compare(one, case.topk_idx(0).to(dtype), expert_to_node, num_nodes, seed % num_nodes)


def test_ids_that_are_no_experts_are_told_and_count_as_none(one):
    ids = torch.randint(0, 8, (2000, 8), generator=torch.Generator().manual_seed(0))
    ids[1500, 3], ids[700, 6], ids[1999, 7] = 8, -2, 1 << 40
    compare(one, ids, torch.arange(8) % 4, 4, 1)

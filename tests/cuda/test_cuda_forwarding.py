"""The kernel ``plan_forwarding`` against its twin, on one GPU."""

import pytest
import torch

from comparison import assert_same_bits
from fusco.cuda.kernels.plan_forwarding import (
    ForwardingSummary,
    ForwardingTensors,
    ForwardingTerms,
    PackedForwarding,
    message_bytes,
    plan_forwarding as plan_on_device,
)
from fusco.planner.routing import Routing
from generator import KINDS, Case
from reference.plan_forwarding import plan_forwarding

pytestmark = pytest.mark.cuda


def compare(one, routing, expert_to_node, num_nodes, own_node, max_rows=None):
    launcher = one.comm._engine._context.launcher(torch.cuda.current_stream())
    summary = ForwardingSummary(num_nodes, own_node, one.device)
    weights = None if routing.topk_weights is None else routing.topk_weights.to(one.device)
    on_device = Routing(routing.topk_idx.to(one.device), weights)
    terms = ForwardingTerms(max_rows, max_rows is not None, sends_invalid_ids=False, ticket=3)
    shape, num_tokens = routing.topk_idx.shape, len(routing.topk_idx)
    num_elements = ForwardingTensors.num_elements(num_nodes, num_tokens)
    made = ForwardingTensors(torch.empty(num_elements, dtype=torch.int32, device=one.device), num_nodes, num_tokens)
    num_bytes = message_bytes(terms, shape, 0 if weights is None else weights.element_size())
    messages = torch.empty(num_nodes - 1, num_bytes, dtype=torch.uint8, device=one.device)
    table, packed = expert_to_node.int().to(one.device), PackedForwarding(made, messages.data_ptr())
    published = (on_device.topk_idx, on_device.topk_weights)
    plan_on_device(launcher, published, shape, table, summary, terms, packed, 3).launch(launcher.stream)
    torch.cuda.synchronize()
    table = torch.cat([expert_to_node, torch.tensor([-1])])
    expected = plan_forwarding(routing, table, num_nodes, own_node, max_rows)
    *counts, bad_pair, bad_id = expected.summary.tolist()
    assert summary.is_of(3)
    assert (summary.num_rows_to_node, summary.bad_pair, summary.bad_id) == (counts, bad_pair, bad_id)
    most = max(counts)
    overflow = summary.take_overflow()
    assert overflow == (None if max_rows is None or most <= max_rows else (counts.index(most), most, max_rows))
    assert_same_bits(made.token_to_place.cpu(), expected.plan.token_to_place, "token_to_place")
    others = [node for node in range(num_nodes) if node != own_node]
    for node, message, packed in zip(others, expected.messages, messages.cpu(), strict=True):
        num_sent, num_listed = len(message.topk_idx), min(counts[node], max_rows or counts[node])
        seen, twin = made.node_to_tokens.cpu()[node, :num_sent], expected.plan.node_to_tokens[node, :num_sent]
        assert_same_bits(seen.contiguous(), twin.contiguous(), f"tokens for node {node}")
        end = 0 if message.topk_weights is None else message.topk_weights.nbytes
        ids = packed[end : end + message.topk_idx.nbytes].view(torch.int32).view(message.topk_idx.shape)
        assert_same_bits(ids, message.topk_idx, f"ids for node {node}")
        if message.topk_weights is not None:
            sent = packed[:end].view(message.topk_weights.dtype).view(message.topk_weights.shape)
            assert_same_bits(sent[:num_listed], message.topk_weights[:num_listed], f"weights for node {node}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_nodes", "num_topk", "max_tokens"), [(2, 8, 40), (3, 1, 3000), (5, 32, 1024), (64, 4, 1025)]
)
def test_every_kind_of_routing(one, num_nodes, num_topk, max_tokens, dtype):
    for seed, kind in enumerate(KINDS):
        case = Case(kind=kind, seed=seed, world_size=1, num_experts=96, num_topk=num_topk, max_tokens=max_tokens)
        weights = (None, case.topk_weights(0), case.topk_weights(0, torch.float64))[seed % 3]
        routing, expert_to_node = Routing(case.topk_idx(0).to(dtype), weights), torch.arange(96) * 7 % num_nodes
        num_tokens = len(routing.topk_idx)
        for max_rows in (None, num_tokens, -(-num_tokens // 3)):
            compare(one, routing, expert_to_node, num_nodes, seed % num_nodes, max_rows)


def test_ids_that_are_no_experts_are_told_and_count_as_none(one):
    ids = torch.randint(0, 8, (2000, 8), generator=torch.Generator().manual_seed(0))
    ids[1500, 3], ids[700, 6], ids[1999, 7] = 8, -2, 1 << 40
    compare(one, Routing(ids), torch.arange(8) % 4, 4, 1)

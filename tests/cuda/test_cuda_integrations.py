"""Waits of the host in HybridEP's calls on one GPU: one in a blocking dispatch, none in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from one_rank import NUM_EXPERTS

from comparison import assert_same_bits
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from fusco.integrations.routing_maps import indices_to_map

HIDDEN, NUM_TOKENS, NUM_TOPK = 256, 64, 4


@pytest.fixture
def buffer(group):
    buffer = HybridEPBuffer(group, HIDDEN, NUM_TOKENS, NUM_EXPERTS)
    yield buffer
    buffer.destroy()


@contextmanager
def waits_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the waits for plans inside; a wait that PyTorch knows of is an error."""
    waits: list[str] = []
    sized = DevicePlanner.sized  # at the end of each wait, of repeated calls, too

    def counted(self, plan, num_slots):
        waits.append("size")
        return sized(self, plan, num_slots)

    monkeypatch.setattr(DevicePlanner, "sized", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        monkeypatch.setattr(DevicePlanner, "sized", sized)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_layer_waits_once_if_it_may(buffer, monkeypatch, is_blocking):
    x = torch.randn(NUM_TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.rand(NUM_TOKENS, NUM_EXPERTS, device="cuda").topk(NUM_TOPK)
    routing_map, probs = indices_to_map(ids, weights, NUM_TOKENS, NUM_EXPERTS)
    most = NUM_TOKENS * NUM_TOPK + 3 * NUM_EXPERTS  # blocks of experts are padded to 4 rows
    limit = {} if is_blocking else {"num_permuted_tokens": most, "non_blocking": True}

    def layer() -> tuple[torch.Tensor, ...]:
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, pad_multiple=4, **limit
        )
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=4)
        again, *_ = buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=counts.sum())
        _, grad_probs = buffer.combine_with_unpermute(hidden=again, probs=row_probs, handle=handle)
        return out, grad_probs, counts, handle[-1]

    expected = layer()  # makes the communicator, and learns the number of experts of a token
    with waits_of(monkeypatch) as waits:
        out, grad_probs, counts, has_overflow = layer()
    assert waits == ["size"] * is_blocking
    assert counts.device.type == ("cpu" if is_blocking else "cuda")
    assert_same_bits(out.cpu(), expected[0].cpu(), "sums")
    assert_same_bits(grad_probs.cpu(), probs.cpu(), "gradients of weights, which are the weights here")
    assert has_overflow.tolist() == [0]
    assert counts.tolist() == [-(-int(n) // 4) * 4 for n in torch.bincount(ids.view(-1), minlength=NUM_EXPERTS)]


def test_more_experts_than_the_first_map_had_are_an_error_or_an_overflow(buffer):
    x = torch.ones(2, HIDDEN, device="cuda", dtype=torch.bfloat16)
    few = torch.zeros(2, NUM_EXPERTS, dtype=torch.bool, device="cuda")
    few[:, 0] = True
    buffer.dispatch_with_permute(hidden=x, routing_map=few)
    many = torch.ones_like(few)
    with pytest.raises(ValueError, match="more than 4 experts"):
        buffer.dispatch_with_permute(hidden=x, routing_map=many)
    *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=many, non_blocking=True, num_permuted_tokens=64)
    assert handle[-1].tolist() == [1]

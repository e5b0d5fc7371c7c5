"""Functions on ranks: dispatches and combines of ``deep_ep`` along handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hybrid_ep_jobs import open_hybrid
from integration_cases import HIDDEN, cases
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from comparison import assert_same_bits
from fusco.api import growth
from fusco.api.collective import run_collective
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer
from fusco.integrations.routing_maps import indices_to_map
from generator import values


class Ops(TorchDispatchMode):
    """Counts operations, without views, outside of collectives: on CUDA each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = self.num_collectives = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(of.alias_info and not of.alias_info.is_write for of in function._schema.returns):
            self.num_ops += 1
        return function(*args, **(kwargs or {}))

    def run_collective(self, *given: Any) -> Any:
        self.num_collectives += 1
        with _disable_current_modes():
            return run_collective(*given)


def count_ops(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the operations and the collectives of a call that has been made before."""
    call()
    with Ops() as ops, mock.patch.object(growth, "run_collective", ops.run_collective):
        call()
    return ops.num_ops, ops.num_collectives


def ops_along_handles(group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
    """Operations and collectives of each call along a handle, from its second time on."""
    rank, hybrid, buffer = group.rank(), open_hybrid(group, group.size()), Buffer(group)
    (case,) = cases(group.size(), ["balanced"])
    ids, weights, num_experts = case.topk_idx(rank), case.topk_weights(rank), case.num_experts
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    _, probs = indices_to_map(ids, weights, len(ids), num_experts)
    rows, of_rows, _, of_ranks = hybrid.dispatch(x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts)
    permuted, of_permuted, _, _, of_experts = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
    *_, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, num_experts)
    first, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=is_in, num_tokens_per_expert=per_expert
    )
    calls = {
        "dispatch": lambda: hybrid.dispatch(x, topk_weights=weights, handle=of_ranks),
        "combine": lambda: hybrid.combine(rows, of_rows, of_ranks),
        "dispatch_with_permute": lambda: hybrid.dispatch_with_permute(hidden=x, probs=probs, handle=of_experts),
        "combine_with_unpermute": lambda: hybrid.combine_with_unpermute(
            hidden=permuted, probs=of_permuted, handle=of_experts
        ),
        "version 1: dispatch": lambda: buffer.dispatch(x, handle=handle),
        "version 1: combine": lambda: buffer.combine(first, handle),
    }
    return {name: count_ops(call) for name, call in calls.items()}


def check_other_weights_along_handles(group: dist.ProcessGroup) -> None:
    """A handle serves calls with other weights and values; on a communicator with room for weights and without."""
    rank, hybrid, elastic = group.rank(), open_hybrid(group, group.size()), ElasticBuffer(group)
    (case,) = cases(group.size(), ["ragged with holes"])
    ids, num_experts = case.topk_idx(rank), case.num_experts
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    given = [case.topk_weights(rank) * factor for factor in (1, 2, 4)]
    dense = [indices_to_map(ids, weights, len(ids), num_experts)[1] for weights in given]
    rows, of_node, _, handle = hybrid.dispatch(x, topk_idx=ids, topk_weights=given[0], num_of_experts=num_experts)
    permuted, of_permuted, *_, of_experts = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, probs=dense[0])
    _, _, of_expanded, expanded, _ = elastic.dispatch(
        x, topk_idx=ids, topk_weights=given[0], num_experts=num_experts, do_expand=True
    )
    without_room = replace(of_experts[0].capacity, max_bytes_per_token=1)
    full = (replace(of_experts[0], capacity=without_room), *of_experts[1:])
    for factor, weights, probs in zip((1, 2, 4), given, dense, strict=True):
        for by in ({"topk_weights": weights}, {"probs": probs}):
            again, other, _, same = hybrid.dispatch(x, handle=handle, **by)
            assert same is handle
            assert_same_bits(again, rows, "rows")
            assert_same_bits(other, of_node * factor, "weights of rows by expert")
        noise = torch.where(other == 0, float("nan"), other)  # values of experts that a row was not sent for
        assert_same_bits(hybrid.combine(rows, noise, handle)[1].contiguous(), probs, "weights of tokens")
        for each in (of_experts, full):
            again, other, *_ = hybrid.dispatch_with_permute(hidden=x, probs=probs, handle=each)
            assert_same_bits(again, permuted, "rows")
            assert_same_bits(other, of_permuted * factor, "weights of rows")
            _, of_tokens = hybrid.combine_with_unpermute(hidden=permuted, probs=other, handle=each)
            assert_same_bits(of_tokens, probs, "weights of tokens")
        other = elastic.dispatch(x, topk_weights=weights, handle=expanded)[2]
        assert_same_bits(other, of_expanded * factor, "weights of expanded rows")
    assert hybrid.dispatch(x, handle=handle)[1] is None
    # Of fewer experts a token than the communicator has room for.
    few = {"topk_weights": given[0][:, :1]}
    _, first, *_, of_few = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids[:, :1], **few)
    assert_same_bits(hybrid.dispatch_with_permute(hidden=x, handle=of_few, **few)[1], first, "weights of few experts")

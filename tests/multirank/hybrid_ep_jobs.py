"""Functions on ranks: the calls of frameworks to HybridEP's buffer, against the specification."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deep_ep_jobs import finds_a_fault_of_version_1
from integration_cases import HIDDEN, KINDS, NUM_LOCAL, cases, law_of

from comparison import assert_same_bits
from fusco import PeerFailureError, RejectedInputError
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from fusco.integrations.routing_maps import indices_to_map
from generator import Case, any_bits, values
from law import Law


def open_hybrid(group: dist.ProcessGroup, ranks_per_node: int) -> HybridEPBuffer:
    """As Megatron makes it, with the tokens of a small first call."""
    return HybridEPBuffer(
        group=group,
        hidden_dim=HIDDEN,
        max_num_of_tokens_per_rank=4,
        num_local_experts=NUM_LOCAL,
        use_fp8=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=ranks_per_node,
    )


def check_hybrid_ep(group: dist.ProcessGroup, ranks_per_node: int, pad_multiple: int | None) -> None:
    """Dispatch, combine, and both backward passes as Megatron and Automodel call them; maps and indices."""
    check_hybrid_buffer(group, open_hybrid(group, ranks_per_node), pad_multiple)


def check_hybrid_buffer(group: dist.ProcessGroup, buffer: HybridEPBuffer, pad_multiple: int | None) -> None:
    """Compare everything that a buffer returns with the specification."""
    rank = group.rank()
    for case in cases(group.size()):
        law = law_of(case, pad_multiple or 1)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in law.ranks]
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        routing_map, probs = indices_to_map(ids, weights, len(ids), case.num_experts)
        by_map = {"routing_map": routing_map} if case.seed % 2 else {"topk_idx": ids, "routing_map": None}
        rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x[rank],
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=NUM_LOCAL,
            pad_multiple=pad_multiple,
            num_permuted_tokens=None,
            non_blocking=False,
            **by_map,
        )
        assert scales is None
        assert_same_bits(rows, law.rows(rank, x), "rows")
        padded = [len(block) + -len(block) % (pad_multiple or 1) for block in law.blocks(rank)]
        assert counts.tolist() == padded
        assert counts.device.type == "cpu"
        assert len(handle) == 11
        assert int(handle[-1]) == 0
        given = case.world_topk_weights()
        of_pairs = [0.0 if pair is None else float(given[pair.src][pair.token, pair.k]) for pair in law.slots(rank)]
        torch.testing.assert_close(row_probs, torch.tensor(of_pairs), rtol=0, atol=0)
        check_hybrid_backward(buffer, law, case, handle, counts)


def check_hybrid_backward(buffer: HybridEPBuffer, law: Law, case: Case, handle: tuple, counts: torch.Tensor) -> None:
    """Combine, its backward (a dispatch along the handle), and dispatch's backward (a combine with values)."""
    rank = buffer.rank
    y = [values((len(law.slots(r)), HIDDEN), torch.float32, case.seed, "y", r) for r in law.ranks]
    out, none = buffer.combine_with_unpermute(hidden=y[rank], handle=handle, pad_multiple=None)
    assert none is None
    torch.testing.assert_close(out.double(), law.sums(rank, y, None, law.ranks).exact, rtol=1e-5, atol=1e-5)
    grad = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "grad", r) for r in law.ranks]
    again, row_probs, _, counts_again, _ = buffer.dispatch_with_permute(
        hidden=grad[rank], scaling_factor=None, handle=handle, pad_multiple=None, num_permuted_tokens=counts.sum()
    )
    assert row_probs is None
    assert counts_again.tolist() == counts.tolist()
    assert_same_bits(again, law.rows(rank, grad), "the gradients of combine")
    # Gradients may be non-contiguous.
    row_values = [values((len(law.slots(r)), 2), torch.float32, case.seed, "values", r) for r in law.ranks]
    _, of_tokens = buffer.combine_with_unpermute(
        hidden=y[rank].T.contiguous().T, probs=row_values[rank][:, 1], handle=handle
    )
    expected = torch.zeros(case.num_tokens(rank), case.num_experts)
    for owner in law.ranks:
        for pair, value in zip(law.slots(owner), row_values[owner][:, 1], strict=True):
            if pair and pair.src == rank:
                expected[pair.token, case.topk_idx(rank)[pair.token, pair.k]] = value
    torch.testing.assert_close(of_tokens, expected, rtol=0, atol=0)


def finds_a_fault(group: dist.ProcessGroup, tamper: str) -> bool:
    """Return whether the check fails on this rank for a buffer with a fault; a rank that fails leaves the others."""
    buffer = open_hybrid(group, group.size())
    if tamper.startswith("version 1"):
        return finds_a_fault_of_version_1(group, tamper)
    dispatch, combine = buffer.dispatch_with_permute, buffer.combine_with_unpermute

    def faulty_dispatch(**arguments: object) -> tuple:
        rows, *rest = dispatch(**arguments)
        if len(rows) > 2 and tamper == "drop a token":
            rows[1] = 0
        if len(rows) > 2 and tamper == "swap two rows of an expert":
            rows[:2] = rows[:2].flip(0)
        return rows, *rest

    def faulty_combine(**arguments: object) -> tuple:
        sums, values_ = combine(**arguments)
        return sums, values_ if values_ is None else torch.zeros_like(values_)

    buffer.dispatch_with_permute = faulty_dispatch
    if tamper == "forget the gradients of weights":
        buffer.combine_with_unpermute = faulty_combine
    try:
        check_hybrid_buffer(group, buffer, None)
    except AssertionError:
        return True
    except PeerFailureError:
        return False
    finally:
        buffer.destroy()
    return False


def check_lost_experts(group: dist.ProcessGroup) -> None:
    """A dispatch without permutation raises if indices lack experts of the map, as they may on CUDA."""
    buffer = open_hybrid(group, group.size())
    x, routing_map = torch.ones(2, HIDDEN), torch.ones(2, NUM_LOCAL * group.size(), dtype=torch.bool)
    indices_of = buffer._maps.indices_of

    def losing(routing_map: torch.Tensor) -> torch.Tensor:
        buffer._maps.lost = buffer._maps._lost_on_host = torch.ones(1, dtype=torch.int64)
        return indices_of(routing_map)

    buffer._maps.indices_of = losing
    for call in (buffer.dispatch, buffer.dispatch_with_permute):
        with pytest.raises((ValueError, RejectedInputError), match="routing_map has tokens with more than"):
            call(hidden=x, routing_map=routing_map)
    buffer.destroy()


def check_rank_rows(group: dist.ProcessGroup, ranks_per_node: int) -> None:
    """HybridEP's dispatch without permutation: one row for each token and rank, between nodes as well."""
    rank, buffer = group.rank(), open_hybrid(group, ranks_per_node)
    for case in cases(group.size(), KINDS[:3]):
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in range(group.size())]
        rows, of_node, _, handle = buffer.dispatch(
            x[rank], topk_idx=ids, topk_weights=weights, num_of_experts=case.num_experts
        )
        arrived = [
            (src, token)
            for src in range(group.size())
            for token, experts in enumerate(case.topk_idx(src).tolist())
            if any(expert // NUM_LOCAL == rank for expert in experts if expert >= 0)
        ]
        assert_same_bits(rows, torch.stack([x[src][token] for src, token in arrived]) if arrived else rows, "rows")
        assert int(handle[3]) == len(arrived)
        assert handle[4].sum(1).tolist() == [
            int((case.topk_idx(src)[token] // NUM_LOCAL == rank).sum()) for src, token in arrived
        ]
        out, of_tokens = buffer.combine(rows, of_node, handle)
        num_copies = Buffer(group).get_dispatch_layout(ids, case.num_experts)[3].sum(1, keepdim=True)
        torch.testing.assert_close(out, x[rank] * num_copies, rtol=1e-5, atol=1e-5)
        expected = indices_to_map(ids, weights, len(ids), case.num_experts)[1]
        torch.testing.assert_close(of_tokens, expected, rtol=0, atol=0)


def check_replay(group: dist.ProcessGroup) -> None:
    """Recomputation as in Automodel: the handle of the forward pass with weights, whose rows come back."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["ragged with holes"])
    ids = case.topk_idx(rank)
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    _, probs = indices_to_map(ids, case.topk_weights(rank), len(ids), case.num_experts)
    first = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs, num_of_experts=case.num_experts)
    again = buffer.dispatch_with_permute(hidden=x, probs=probs, handle=first[4])
    assert_same_bits(again[0], first[0], "rows")
    assert_same_bits(again[1], first[1], "weights")


def check_layers_with_different_experts(group: dist.ProcessGroup) -> None:
    """One buffer, as Megatron has it, for layers with 3, 5 and 1 experts a rank; backward passes in reverse order."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    layers = []
    for num_local in (NUM_LOCAL, 5, 1):
        num_experts = num_local * group.size()
        ids = torch.arange(12).view(6, 2).add(rank) % num_experts
        weights = values((6, 2), torch.float32, "weights", rank, num_local)
        routing_map, probs = indices_to_map(ids, weights, 6, num_experts)
        x = values((6, HIDDEN), torch.float32, "x", rank, num_local)
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, num_of_experts_per_rank=num_local
        )
        assert len(counts) == num_local
        layers.append((x, routing_map, probs, rows, row_probs, handle))
        sent = buffer.dispatch(hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts)
        assert sent[3][4].shape[1] == num_local
        _, of_tokens = buffer.combine(sent[0], sent[1], sent[3])
        assert_same_bits(of_tokens, probs, "weights")
    for x, routing_map, probs, rows, row_probs, handle in reversed(layers):
        sums, of_tokens = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)
        torch.testing.assert_close(sums, x * routing_map.sum(1, keepdim=True))
        assert_same_bits(of_tokens, probs, "weights")


def check_fp8(group: dist.ProcessGroup) -> None:
    """Rows of bytes with float32 scales; results come back in bfloat16, twice as wide."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["balanced"])
    law = law_of(case, 8)
    x = [any_bits((case.num_tokens(r), HIDDEN), torch.uint8, "x", r) for r in law.ranks]
    scales = [values((case.num_tokens(r), HIDDEN // 128), torch.float32, "scales", r) for r in law.ranks]
    column_major = scales[rank].T.contiguous().T
    rows, _, row_scales, _, handle = buffer.dispatch_with_permute(
        hidden=x[rank], topk_idx=case.topk_idx(rank), scaling_factor=column_major, pad_multiple=8
    )
    assert_same_bits(rows, law.rows(rank, x), "rows")
    assert_same_bits(row_scales, law.rows(rank, scales), "scales")
    sums, _ = buffer.combine_with_unpermute(hidden=rows.bfloat16(), handle=handle)
    assert sums.shape == x[rank].shape


def check_static_rows(group: dist.ProcessGroup) -> None:
    """``non_blocking``: as many rows as asked for, counts that stay on the device, and a flag of what was dropped."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["balanced"])
    law, ids = law_of(case, 4), case.topk_idx(rank)
    x = [values((case.num_tokens(r), HIDDEN), torch.float32, "x", r) for r in law.ranks]
    expected, num_needed = law.rows(rank, x), len(law.slots(rank))
    for num_rows in (200, num_needed, num_needed // 8 * 4):
        rows, _, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x[rank], topk_idx=ids, pad_multiple=4, num_permuted_tokens=num_rows, non_blocking=True
        )
        assert len(rows) == num_rows
        assert_same_bits(rows[:num_needed], expected[:num_rows], "rows")
        assert int(counts.sum()) == min(num_rows, num_needed)
        assert (handle[-1].tolist(), handle[-1].dtype) == ([int(num_rows < num_needed)], torch.int32)

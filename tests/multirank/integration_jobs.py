"""Functions on ranks: the calls of frameworks to DeepEP's and HybridEP's buffers, against the specification."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from comparison import assert_same_bits
from fusco import ClosedError, PeerFailureError
from fusco.integrations.deep_ep_buffer import Buffer
from fusco.integrations.dense_routing import indices_to_map
from fusco.integrations.elastic_buffer import ElasticBuffer
from fusco.integrations.ep_handle import EPHandle
from fusco.integrations.hybrid_ep import HybridEPBuffer
from generator import Case, any_bits, values
from law import Law

HIDDEN, NUM_LOCAL, NUM_TOPK = 256, 3, 4
# Of a token that names an expert twice, a map keeps one.
KINDS = ("ragged with holes", "balanced", "a rank without tokens", "ragged and skewed", "no experts")


def cases(num_ranks: int, kinds: Sequence[str] = KINDS) -> list[Case]:
    """Routings of all ranks; later ones are larger, so that the communicator grows."""
    return [
        Case(
            kind=kind,
            seed=seed,
            world_size=num_ranks,
            num_experts=NUM_LOCAL * num_ranks,
            num_topk=NUM_TOPK,
            max_tokens=8 * (seed + 1),
        )
        for seed, kind in enumerate(kinds)
    ]


def law_of(case: Case, alignment: int = 1) -> Law:
    """The specification, with equal runs of experts."""
    return Law(case.world_topk_idx, [expert // NUM_LOCAL for expert in range(case.num_experts)], alignment)


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
        buffer.abort()
    return False


def finds_a_fault_of_version_1(group: dist.ProcessGroup, tamper: str) -> bool:
    """As ``finds_a_fault``."""
    buffer = Buffer(group)
    dispatch, combine = buffer.dispatch, buffer.combine

    def faulty_dispatch(*given: object, **arguments: object) -> tuple:
        rows, *rest = dispatch(*given, **arguments)
        if len(rows) > 2 and tamper.endswith("drop a token"):
            rows[1] = 0
        return rows, *rest

    def faulty_combine(*given: object, **arguments: object) -> tuple:
        sums, weights, event = combine(*given, **arguments)
        return sums, torch.zeros_like(weights) if tamper.endswith("forget weights") else weights, event

    buffer.dispatch, buffer.combine = faulty_dispatch, faulty_combine
    try:
        check_deep_ep_buffer(group, buffer)
    except AssertionError:
        return True
    except PeerFailureError:
        return False
    finally:
        buffer.destroy()
    return False


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


def leave_open(group: dist.ProcessGroup) -> None:
    """Use buffers that nothing closes, as frameworks do, and let the process end."""
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)
    hybrid, elastic = open_hybrid(group, group.size()), ElasticBuffer(group)
    hybrid.dispatch_with_permute(hidden=x, topk_idx=ids)
    elastic.dispatch(x, topk_idx=ids, num_experts=group.size(), do_expand=True)
    _LEFT_OPEN.extend([hybrid, elastic])


_LEFT_OPEN: list[object] = []


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


def check_deep_ep(group: dist.ProcessGroup) -> None:
    """Layout, dispatch, combine, cached dispatch and fixed numbers of rows, as Megatron and vLLM call them."""
    buffer = Buffer(group, 1 << 20, 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True)
    check_deep_ep_buffer(group, buffer)
    buffer.destroy()


def check_deep_ep_buffer(group: dist.ProcessGroup, buffer: Buffer) -> None:
    """Compare everything that a buffer returns with the specification."""
    rank, size = group.rank(), group.size()
    for case in cases(size):
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in range(size)]
        per_rank, per_node, per_expert, is_in, event = buffer.get_dispatch_layout(ids, case.num_experts)
        assert per_node is None
        assert event.event is None
        assert per_rank.tolist() == is_in.sum(0).tolist()
        assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(case.num_experts)]
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in}
        rows, idx, row_weights, counts, handle, event = buffer.dispatch(
            x[rank], topk_idx=ids, topk_weights=weights, async_finish=True, expert_alignment=4, **layout
        )
        event.current_stream_wait()
        arrived = [
            (src, token)
            for src in range(size)
            for token, experts in enumerate(case.topk_idx(src).tolist())
            if any(expert // NUM_LOCAL == rank for expert in experts if expert >= 0)
        ]
        expected = torch.stack([x[src][token] for src, token in arrived]) if arrived else x[rank][:0]
        assert_same_bits(rows, expected, "rows")
        local = [case.topk_idx(src)[token] - rank * NUM_LOCAL for src, token in arrived]
        local = [torch.where((each >= 0) & (each < NUM_LOCAL), each, -1) for each in local]
        assert idx.tolist() == [each.tolist() for each in local]
        given = [case.topk_weights(src)[token] * (each >= 0) for (src, token), each in zip(arrived, local, strict=True)]
        assert row_weights.tolist() == [each.tolist() for each in given]
        assert counts == [-(-int((idx == expert).sum()) // 4) * 4 for expert in range(NUM_LOCAL)]
        of_sources = torch.tensor([sum(src == r for src, _ in arrived) for r in range(size)])
        assert handle[0][:, rank].tolist() == of_sources.cumsum(0).tolist()
        check_deep_ep_way_back(buffer, case, rows, row_weights, handle)
        again, *rest = buffer.dispatch(x[rank] * 2, handle=handle)
        assert_same_bits(again, expected * 2, "a cached dispatch")
        assert rest[:4] == [None, None, [], None]
    check_worst_case(buffer, case, x[rank], layout)


def check_deep_ep_way_back(
    buffer: Buffer, case: Case, rows: torch.Tensor, row_weights: torch.Tensor, handle: tuple
) -> None:
    """Each rank's row of a token is a copy of it: sums are the token times the number of its ranks."""
    ids = case.topk_idx(buffer.rank)
    x = values((case.num_tokens(buffer.rank), HIDDEN), torch.float32, case.seed, "x", buffer.rank)
    num_copies = buffer.get_dispatch_layout(ids, case.num_experts)[3].sum(1, keepdim=True)
    bias = torch.ones_like(x)
    out, weights, _ = buffer.combine(rows, handle, topk_weights=row_weights, bias=bias)
    torch.testing.assert_close(out, x * num_copies + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, case.topk_weights(buffer.rank) * (ids >= 0), rtol=0, atol=0)


def check_worst_case(buffer: Buffer, case: Case, x: torch.Tensor, layout: dict[str, torch.Tensor]) -> None:
    """``num_worst_tokens`` fixes the number of rows; indices behind the last are -1, and there is no list."""
    ids, weights = case.topk_idx(buffer.rank), case.topk_weights(buffer.rank)
    exact, idx, *_ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    num_worst = case.max_tokens * buffer.group_size + 3
    rows, worst_idx, _, counts, _, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_worst_tokens=num_worst, **layout
    )
    assert counts == []
    assert len(rows) == num_worst
    assert_same_bits(rows[: len(exact)], exact, "rows")
    assert_same_bits(worst_idx[: len(exact)], idx, "indices")
    assert (worst_idx[len(exact) :] == -1).all()


def check_elastic(group: dist.ProcessGroup) -> None:
    """Expanded dispatch, cached dispatch, combine, and fixed numbers of rows, as SGLang and vLLM call them."""
    rank, size = group.rank(), group.size()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=HIDDEN, num_topk=NUM_TOPK, explicitly_destroy=True)
    for case in cases(size):
        law, ids, weights = law_of(case, 8), case.topk_idx(rank), case.topk_weights(rank)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in law.ranks]
        scales = [values((case.num_tokens(r), HIDDEN // 128), torch.float32, case.seed, "s", r) for r in law.ranks]
        stats = torch.ones(NUM_LOCAL, dtype=torch.int32)
        (rows, row_scales), none, row_weights, handle, event = buffer.dispatch(
            (x[rank], scales[rank].T.contiguous().T),
            topk_idx=ids,
            topk_weights=weights,
            cumulative_local_expert_recv_stats=stats,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=case.max_tokens,
            expert_alignment=8,
            num_sms=24,
            do_cpu_sync=True,
            do_expand=True,
        )
        assert none is None
        assert event.event is None
        assert_same_bits(rows, law.rows(rank, x), "rows")
        assert_same_bits(row_scales, law.rows(rank, scales), "scales")
        assert_same_bits(row_weights, law.row_weights(rank, case.world_topk_weights()), "weights")
        sizes, blocks = law.counts(rank), [-(-count // 8) * 8 for count in law.counts(rank)]
        assert handle.num_recv_tokens_per_expert_list == blocks
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == sizes
        assert stats.tolist() == [1 + count for count in sizes]
        ends = [sum(blocks[:local]) + count for local, count in enumerate(sizes)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_expanded_tokens == sum(blocks)
        check_elastic_way_back(buffer, law, case, handle)
        again, _, other_weights, same, _ = buffer.dispatch(x[rank] * 2, topk_weights=weights * 2, handle=handle)
        assert same is handle
        assert_same_bits(again, law.rows(rank, [2 * each for each in x]), "a cached dispatch")
        assert_same_bits(other_weights, 2 * row_weights, "weights of a cached dispatch")
        static, _, _, handle, _ = buffer.dispatch(
            x[rank],
            topk_idx=ids,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=case.max_tokens,
            do_cpu_sync=False,
            do_expand=True,
        )
        assert handle.num_recv_tokens_per_expert_list == []
        assert len(static) == size * case.max_tokens * min(NUM_TOPK, NUM_LOCAL)
        expected = law_of(case).rows(rank, x)
        assert_same_bits(static[: len(expected)], expected, "rows without a wait")
    buffer.destroy()


def check_elastic_way_back(buffer: ElasticBuffer, law: Law, case: Case, handle: EPHandle) -> None:
    """Sums of rows, with a bias, and a value of each row for its token and expert."""
    rank, ids = buffer.rank_idx, case.topk_idx(buffer.rank_idx)
    y = [values((len(law.slots(r)), HIDDEN), torch.float32, case.seed, "y", r) for r in law.ranks]
    numbers = [values((len(law.slots(r)),), torch.float32, case.seed, "numbers", r) for r in law.ranks]
    bias = torch.ones(len(ids), HIDDEN)
    out, of_tokens, _ = buffer.combine(y[rank], handle=handle, topk_weights=numbers[rank], bias=(bias, bias))
    torch.testing.assert_close(out.double() - 2, law.sums(rank, y, None, law.ranks).exact, rtol=1e-5, atol=1e-5)
    expected = torch.zeros(ids.shape)
    for owner in law.ranks:
        for pair, number in zip(law.slots(owner), numbers[owner], strict=True):
            if pair and pair.src == rank:
                expected[pair.token, pair.k] = number
    torch.testing.assert_close(of_tokens, expected, rtol=0, atol=0)


def elastic_refusals(group: dist.ProcessGroup) -> list[str]:
    """Texts of errors."""
    buffer, texts = ElasticBuffer(group), []
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int64)
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, num_experts=4, do_expand=True)
    for call in (
        lambda: ElasticBuffer(group, num_cpu_bytes=1),
        lambda: buffer.dispatch(x, topk_idx=ids, num_experts=4),
        lambda: buffer.dispatch(x, do_expand=True),
        lambda: buffer.dispatch(x, topk_idx=ids, num_experts=4, do_expand=True, use_tma_aligned_col_major_sf=True),
        lambda: buffer.dispatch(x, topk_idx=ids, num_experts=4, do_expand=True, do_cpu_sync=False),
        lambda: buffer.combine(x, handle=None),
        lambda: buffer.pp_send(x, 0),
        lambda: handle.num_recv_tokens,
    ):
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def refusals(group: dist.ProcessGroup) -> list[str]:
    """Return the texts of errors; the buffer works afterwards."""
    buffer = open_hybrid(group, group.size())
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int64)
    texts = []
    for call in (
        lambda: buffer.dispatch_with_permute(hidden=x),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=5),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids, non_blocking=True),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids - 2 * (group.rank() == 0)),
        lambda: buffer.combine_with_unpermute(hidden=x),
        lambda: Buffer(group, low_latency_mode=True),
        lambda: Buffer(group).low_latency_dispatch(x),
    ):
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    buffer.abort()
    with pytest.raises(ClosedError, match="have been aborted"):
        buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    return texts


def under_default_device(group: dist.ProcessGroup) -> None:
    """Models are built under a default device of "meta", and run in bfloat16 by default."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            run_hybrid_ep(group)
    finally:
        torch.set_default_dtype(dtype)


def run_hybrid_ep(group: dist.ProcessGroup) -> None:
    """One layer with identity for experts, on tensors that name their device."""
    ids = torch.tensor([[0, NUM_LOCAL * group.size() - 1]], device="cpu")
    x = torch.full((1, HIDDEN), float(group.rank()), dtype=torch.float32, device="cpu")
    made = (open_hybrid(group, group.size()), Buffer(group), ElasticBuffer(group))
    for buffer, call in zip(made, (_through_hybrid_ep, _through_deep_ep, _through_elastic), strict=True):
        torch.testing.assert_close(call(buffer, x, ids), 2 * x)


def _through_hybrid_ep(buffer: HybridEPBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    probs = torch.ones(1, NUM_LOCAL * buffer.group_size, device="cpu")
    rows, row_probs, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
    return buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)[0]


def _through_deep_ep(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    *_, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, NUM_LOCAL * buffer.group_size)
    rows, _, row_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=is_in, num_tokens_per_expert=per_expert
    )
    return buffer.combine(rows, handle, row_weights)[0]


def _through_elastic(buffer: ElasticBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    num_experts = NUM_LOCAL * buffer.num_ranks
    rows, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_experts=num_experts, do_expand=True
    )
    return buffer.combine(rows, handle)[0]


def killed_in_a_layer(group: dist.ProcessGroup) -> str:
    """The last rank leaves in the middle of a layer; the others name it."""
    buffer = open_hybrid(group, group.size())
    x, ids = torch.ones(2, HIDDEN), torch.arange(2, dtype=torch.int64)[:, None]
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    if group.rank() == group.size() - 1:
        buffer.abort()
        return ""
    try:
        buffer.combine_with_unpermute(hidden=rows, handle=handle)
    except PeerFailureError as error:
        return str(error)
    return "no error"

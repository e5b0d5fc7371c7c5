"""Functions on ranks: the calls of frameworks to DeepEP's buffers of both versions, against the specification."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from integration_cases import HIDDEN, NUM_LOCAL, NUM_TOPK, cases, law_of

from comparison import assert_same_bits
from fusco import PeerFailureError
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer, EPBuffer
from fusco.integrations.deep_ep.ep_handle import EPHandle
from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from generator import Case, values
from law import Law


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
    for call in (
        lambda: ElasticBuffer(group, num_cpu_bytes=1),
        lambda: EPBuffer(group, lb_allocation_plan_or_num_bytes=64),
        lambda: buffer.dispatch(x, do_expand=True),
        lambda: buffer.dispatch(x, topk_idx=ids, num_experts=4, do_expand=True, do_cpu_sync=False),
        lambda: buffer.combine(x, handle=None),
        lambda: buffer.pp_send(x, 0),
        lambda: buffer.lb_prefetch_weights(x, x, ids),
    ):
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def refusals_of_handles(group: dist.ProcessGroup) -> list[str]:
    """Return the texts of errors for handles of other calls; rows go along one without experts' ids."""
    first, hybrid = Buffer(group), HybridEPBuffer(group, HIDDEN, 2, NUM_LOCAL)
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)
    _, _, per_expert, is_in, _ = first.get_dispatch_layout(ids, NUM_LOCAL * group.size())
    rows, *_, handle, _ = first.dispatch(x, is_token_in_rank=is_in, num_tokens_per_expert=per_expert)
    *_, of_ranks = hybrid.dispatch(x, topk_idx=ids)
    *_, of_experts = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids)
    without_ids, texts = (handle[1], *of_ranks[1:]), []
    assert_same_bits(hybrid.dispatch(x, handle=without_ids)[0], rows, "rows along a handle without ids")
    for call in (
        lambda: hybrid.dispatch(x, handle=handle),
        lambda: hybrid.combine(rows, handle=handle),
        lambda: hybrid.combine(rows),
        lambda: hybrid.dispatch(x, handle=without_ids, topk_weights=torch.ones(2, 1)),
        lambda: hybrid.dispatch_with_permute(hidden=x, handle=of_ranks[:1]),
        lambda: hybrid.combine_with_unpermute(hidden=x, handle=()),
        lambda: first.dispatch(x, of_experts[:1]),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        texts.append(f"{type(error.value).__name__}: {error.value}")
    first.destroy(), hybrid.destroy()
    return texts

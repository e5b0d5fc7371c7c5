"""Functions on ranks: the calls of DeepEP 2.5, ``EPBuffer``, that are not those of ``ElasticBuffer`` in its tests."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from integration_cases import HIDDEN, NUM_LOCAL, NUM_TOPK, cases

from comparison import assert_same_bits
from fusco.integrations.deep_ep.ep_buffer import EPBuffer
from fusco.integrations.deep_ep.expert_copies import BufferAllocator
from generator import Case, values


def tokens_of(case: Case, rank: int) -> list[tuple[int, int]]:
    """The source rank and token of each row that a rank gets, in order."""
    return [
        (src, token)
        for src, ids in enumerate(case.world_topk_idx)
        for token, experts in enumerate(ids.tolist())
        if any(expert // NUM_LOCAL == rank for expert in experts if expert >= 0)
    ]


def check_rows_by_source(group: dist.ProcessGroup) -> None:
    """Rows, ids, weights, counts, where they came from, cached calls, and results that come with the event."""
    rank, size = group.rank(), group.size()
    buffer = EPBuffer(group, num_max_tokens_per_rank=64, hidden=HIDDEN, num_topk=NUM_TOPK, explicitly_destroy=True)
    for case in cases(size):
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        x = [values((case.num_tokens(r), HIDDEN), torch.bfloat16, case.seed, "x", r) for r in range(size)]
        given = {"topk_idx": ids, "topk_weights": weights, "num_experts": case.num_experts, "expert_alignment": 4}
        event = buffer.dispatch(x[rank], async_with_compute_stream=True, defer_epilogue=True, **given)
        rows, idx, row_weights, handle = event.current_stream_wait()
        arrived = tokens_of(case, rank)
        expected = torch.stack([x[src][token] for src, token in arrived]) if arrived else x[rank][:0]
        assert_same_bits(rows, expected, "rows")
        local = [case.topk_idx(src)[token] - rank * NUM_LOCAL for src, token in arrived]
        local = [torch.where((each >= 0) & (each < NUM_LOCAL), each, -1) for each in local]
        assert idx.tolist() == [each.tolist() for each in local]
        given_weights = [case.topk_weights(src)[token] for src, token in arrived]
        expected_weights = [(w * (each >= 0)).tolist() for w, each in zip(given_weights, local, strict=True)]
        assert row_weights.tolist() == expected_weights
        counts = [int((idx == expert).sum()) for expert in range(NUM_LOCAL)]
        blocks = torch.tensor([-(-count // 4) * 4 for count in counts])
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert handle.num_recv_tokens_per_expert_list == blocks.tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == blocks.cumsum(0).tolist()
        check_sources(case, handle, rank)
        again, _, other_weights, _, _ = buffer.dispatch(2 * x[rank], topk_weights=2 * weights, handle=handle)
        assert_same_bits(again, 2 * expected, "a cached dispatch")
        assert_same_bits(other_weights, 2 * row_weights, "weights of a cached dispatch")
        check_sums_with_biases(buffer, case, (rows, row_weights), handle)
        *_, expanded, _ = buffer.dispatch(x[rank], do_expand=True, do_cpu_sync=False, **given)
        check_sources(case, expanded, rank)
        check_slots(case, expanded, rank)
    buffer.destroy()


def check_sources(case: Case, handle: object, rank: int) -> None:
    """Column 0 of the metadata, and how many tokens came from each rank."""
    arrived = tokens_of(case, rank)
    of_ranks = [sum(src == r for src, _ in arrived) for r in range(case.world_size)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(of_ranks).cumsum(0).tolist()
    expected = [src * 64 + token for src, token in arrived]
    assert handle.recv_src_metadata[: len(arrived), 0].tolist() == expected


def check_slots(case: Case, handle: object, rank: int) -> None:
    """The rows by local expert of each token that came, and -1 for experts of other ranks."""
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    starts = [end - count for end, count in zip(handle.psum_num_recv_tokens_per_expert.tolist(), counts, strict=True)]
    for (src, token), slots in zip(tokens_of(case, rank), handle.recv_src_metadata[:, 2:].tolist(), strict=False):
        for k, expert in enumerate(case.topk_idx(src)[token].tolist()):
            local = expert - rank * NUM_LOCAL
            if expert < 0 or not 0 <= local < NUM_LOCAL:
                assert slots[k] == -1
                continue
            before = sum(
                ids.tolist().count(expert)
                for r in range(src + 1)
                for ids in case.topk_idx(r)[: token if r == src else None]
            )
            assert slots[k] == starts[local] + before + case.topk_idx(src)[token, :k].tolist().count(expert)


def check_sums_with_biases(
    buffer: EPBuffer, case: Case, sent: tuple[torch.Tensor, torch.Tensor], handle: object
) -> None:
    """Sums of 16-bit rows and of two biases are rounded once."""
    rank = buffer.rank_idx
    rows, row_weights = sent
    x = values((case.num_tokens(rank), HIDDEN), torch.bfloat16, case.seed, "x", rank)
    num_copies = sum((case.topk_idx(rank) // NUM_LOCAL == r).any(1) for r in range(case.world_size))
    bias = tuple(values(x.shape, torch.bfloat16, case.seed, name, rank) for name in ("first", "second"))
    exact = x.double() * num_copies[:, None] + bias[0].double() + bias[1].double()
    sums, weights, _ = buffer.combine(rows, handle, topk_weights=row_weights, bias=bias)
    assert torch.equal(sums, exact.to(torch.bfloat16))
    ids = case.topk_idx(rank)
    assert torch.equal(weights, case.topk_weights(rank) * (ids >= 0))


def check_expert_copies(group: dist.ProcessGroup) -> None:
    """Weights in two tensors of different dtypes come to the places that ask for them; gradients go home and add up."""
    rank, size, num_local = group.rank(), group.size(), 2
    plan = BufferAllocator()
    copies = plan.allocate((3, 5), torch.float32), plan.allocate((3, 2, 2), torch.bfloat16)
    buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
    assert plan.materialized
    assert [tuple(each.shape) for each in copies] == [(3, 5), (3, 2, 2)]
    for each in copies:
        each.fill_(-1)
    # Of the first rank's second expert every rank has a copy, also its home; of the last expert the first rank has one.
    mapping = torch.full((size, 3), -1, dtype=torch.int32)
    mapping[:, 1], mapping[0, 2] = 1, size * num_local - 1
    experts = torch.arange(rank * num_local, (rank + 1) * num_local, dtype=torch.float32)
    weights = experts[:, None].repeat(1, 5), (experts + 0.5).to(torch.bfloat16)[:, None].repeat(1, 4)
    event = buffer.lb_prefetch_weights(copies, weights, mapping, previous_event=buffer.capture())
    event.current_stream_wait()
    expected = mapping[rank].float()
    assert torch.equal(copies[0], expected[:, None].repeat(1, 5))
    halves = torch.where(expected < 0, -1, expected + 0.5)
    assert torch.equal(copies[1].float().flatten(1), halves[:, None].repeat(1, 4))
    grads, of_copies = torch.ones(num_local, 4), torch.full((3, 4), 10.0**rank)
    buffer.lb_reduce_grads(of_copies, grads, mapping).current_stream_wait()
    totals = torch.ones(size * num_local)
    totals[1] += sum(10.0**r for r in range(size))
    totals[-1] += 1
    assert torch.equal(grads, totals[rank * num_local : (rank + 1) * num_local, None].repeat(1, 4))
    assert buffer.lb_get_theoretical_num_sms() > 0
    with pytest.raises(ValueError, match="make another BufferAllocator"):
        plan.allocate((1,), torch.float32)
    buffer.destroy()

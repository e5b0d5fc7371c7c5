"""Functions on ranks: the low-latency calls of DeepEP's first version, against the specification."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from integration_cases import HIDDEN, KINDS, NUM_LOCAL, cases

from comparison import assert_same_bits, assert_within
from fusco import Quantize
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.low_latency import LowLatencyHandle
from generator import Case, values
from law import Law
from reference.quantize_rows import quantize_rows

COUNT_BITS = (1 << 32) - 1


def masked_law(case: Case) -> Law:
    """The specification of masked rows that have room for all tokens of all ranks."""
    owners = [expert // NUM_LOCAL for expert in range(case.num_experts)]
    return Law(case.world_topk_idx, owners, rows_per_expert=case.max_tokens * case.world_size)


def check_low_latency(group: dist.ProcessGroup) -> None:
    """Dispatch and combine with and without hooks, weights that change, and memory for rows, as vLLM calls them."""
    rank, size = group.rank(), group.size()
    buffer = Buffer(group, low_latency_mode=True, num_qps_per_rank=NUM_LOCAL, explicitly_destroy=True)
    for number, case in enumerate(cases(size)):
        law, ids, has_hook = masked_law(case), case.topk_idx(rank), number % 2 == 1
        x = [values((case.num_tokens(r), HIDDEN), torch.bfloat16, case.seed, "x", r) for r in law.ranks]
        stats = torch.ones(NUM_LOCAL, dtype=torch.int32)
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x[rank],
            ids,
            case.max_tokens,
            case.num_experts,
            cumulative_local_expert_recv_stats=stats,
            use_fp8=False,
            async_finish=not has_hook,
            return_recv_hook=has_hook,
        )
        assert (hook is not None) == has_hook
        hook() if hook else event.current_stream_wait()
        assert rows.shape == (NUM_LOCAL, case.max_tokens * size, HIDDEN)
        assert counts.tolist() == law.counts(rank)
        assert stats.tolist() == [1 + count for count in law.counts(rank)]
        expected, is_row = law.rows(rank, x), ~law.undefined(rank)
        assert_same_bits(rows.flatten(0, 1)[is_row], expected[is_row], "rows")
        check_handle(law, handle, rank)
        assert list(handle[2:]) == [case.max_tokens, HIDDEN, case.num_experts]
        check_sums(buffer, case, handle, has_hook=has_hook)
    buffer.destroy()


def check_handle(law: Law, handle: LowLatencyHandle, rank: int) -> None:
    """Source tokens, and the run of rows from each rank, in the form that DeepEP's test reads."""
    src_info, layout_range, *_ = handle
    assert src_info.dtype == torch.int32
    for local, block in enumerate(law.blocks(rank)):
        assert src_info[local, : len(block)].tolist() == [pair.token for pair in block]
        sources = [pair.src for pair in block]
        for src in law.ranks:
            first, count = int(layout_range[local, src] >> 32), int(layout_range[local, src] & COUNT_BITS)
            assert sources[first : first + count] == [src] * sources.count(src)


def check_sums(buffer: Buffer, case: Case, handle: LowLatencyHandle, *, has_hook: bool, hidden: int = HIDDEN) -> None:
    """Sums of rows with weights that the dispatch did not know, twice, from memory of the buffer and not."""
    rank, law = buffer.rank, masked_law(case)
    y = [values((len(law.slots(r)), hidden), torch.bfloat16, case.seed, "y", r) for r in law.ranks]
    rows = y[rank].masked_fill(law.undefined(rank)[:, None], torch.nan).view(NUM_LOCAL, -1, hidden)
    for factor, zero_copy in ((1, False), (-2, True)):
        weights = [factor * each for each in case.world_topk_weights()]
        x = rows
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
            x = torch.full_like(rows, torch.nan)
        out = torch.full((case.num_tokens(rank), hidden), torch.nan, dtype=torch.bfloat16)
        sums, event, hook = buffer.low_latency_combine(
            x,
            case.topk_idx(rank),
            weights[rank],
            handle,
            zero_copy=zero_copy,
            async_finish=not has_hook,
            return_recv_hook=has_hook,
            out=None if zero_copy else out,
        )
        hook() if hook else event.current_stream_wait()
        assert zero_copy or sums is out
        expected = law.sums(rank, y, weights, [0] * case.world_size)
        assert_within(sums, expected.exact, law.error_bound(expected, torch.bfloat16, None), "sums")


def check_row_weights(group: dist.ProcessGroup, *, has_hook: bool) -> None:
    """Weights that travel with the tokens, and each row's source rank; a combine with others leaves them."""
    rank, buffer = group.rank(), Buffer(group, low_latency_mode=True)
    for case in cases(group.size()):
        law = masked_law(case)
        x = torch.ones(case.num_tokens(rank), HIDDEN, dtype=torch.bfloat16)
        _, counts, weights, src_ranks, handle, _, hook = buffer.low_latency_dispatch(
            x,
            case.topk_idx(rank),
            case.max_tokens,
            case.num_experts,
            topk_weights=case.world_topk_weights()[rank],
            use_fp8=False,
            return_recv_hook=has_hook,
        )
        if hook:
            hook()
        assert counts.tolist() == law.counts(rank)
        check_sums(buffer, case, handle, has_hook=has_hook)
        is_row, sources = ~law.undefined(rank), [pair.src for pair in law.slots(rank) if pair]
        assert (weights.dtype, src_ranks.dtype) == (torch.float32, torch.int32)
        assert weights.shape == src_ranks.shape == (NUM_LOCAL, case.max_tokens * group.size())
        expected = law.row_weights(rank, case.world_topk_weights())
        assert_same_bits(weights.flatten()[is_row], expected[is_row], "weights")
        assert src_ranks.flatten()[is_row].tolist() == sources
    buffer.destroy()


def check_fp8(group: dist.ProcessGroup) -> None:
    """Rows and scales are those that the token's rank would make, in the layout that DeepEP returns."""
    rank, size, hidden = group.rank(), group.size(), 1024
    buffer = Buffer(group, low_latency_mode=True)
    (case,) = cases(size, KINDS[:1])
    law, num_rows = masked_law(case), case.max_tokens * size
    x = [values((case.num_tokens(r), hidden), torch.bfloat16, case.seed, "x", r) for r in law.ranks]
    is_row = ~law.undefined(rank)
    for round_scale, use_ue8m0 in ((False, False), (True, False), (True, True)):
        (rows, scales), counts, _, _, _ = buffer.low_latency_dispatch(
            x[rank],
            case.topk_idx(rank),
            case.max_tokens,
            case.num_experts,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
        )
        quantize = Quantize(scale="ue8m0" if use_ue8m0 else "power-of-two" if round_scale else "float32")
        made = [quantize_rows(each, quantize) for each in x]
        codes, of_blocks = ([as_codes(part[place]) for part in made] for place in (0, 1))
        expected, of_blocks = law.rows(rank, codes), law.rows(rank, of_blocks)
        assert counts.tolist() == law.counts(rank)
        assert rows.dtype == torch.float8_e4m3fn
        assert_same_bits(as_codes(rows).flatten(0, 1)[is_row], expected[is_row], "values")
        assert scales.shape == (NUM_LOCAL, num_rows, hidden // (512 if use_ue8m0 else 128))
        assert scales.stride(1) == 1
        assert scales.stride(2) * scales.element_size() % 16 == 0
        laid_out = scales.contiguous().flatten(0, 1)[is_row]
        assert_same_bits(laid_out.view(torch.uint8) if use_ue8m0 else laid_out, of_blocks[is_row], "scales")
    buffer.destroy()


def check_nvfp4(group: dist.ProcessGroup, *, has_hook: bool) -> None:
    """Each rank's rows times its own scale, in NVFP4, with scales where SGLang's masked products read them."""
    rank, size, hidden = group.rank(), group.size(), 192  # three tiles of scales
    buffer = Buffer(group, low_latency_mode=True)
    for case in cases(size):
        law, num_rows = masked_law(case), case.max_tokens * size
        x = [values((case.num_tokens(r), hidden), torch.bfloat16, case.seed, "x", r) for r in law.ranks]
        scales_of_ranks = [torch.tensor(3.0 + r) for r in law.ranks]
        (rows, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
            x[rank],
            case.topk_idx(rank),
            case.max_tokens,
            case.num_experts,
            use_fp8=False,
            use_nvfp4=True,
            x_global_scale=scales_of_ranks[rank],
            return_recv_hook=has_hook,
        )
        if hook:
            hook()
        assert counts.tolist() == law.counts(rank)
        assert rows.shape == (num_rows, hidden // 2, NUM_LOCAL)
        assert scales.shape == (32, 4, -(-num_rows // 128), 4, hidden // 64, NUM_LOCAL)
        assert scales.dtype == torch.float8_e4m3fn
        assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        made = [quantize_rows(x[r].float() * scales_of_ranks[r], Quantize("nvfp4")) for r in law.ranks]
        codes, of_blocks = ([as_codes(part[place]) for part in made] for place in (0, 1))
        is_row = ~law.undefined(rank)
        assert_same_bits(
            rows.permute(2, 0, 1).flatten(0, 1)[is_row], law.rows(rank, codes)[is_row], f"values of {case}"
        )
        # (expert, tile, group of rows, row, tile of columns, column): row 32 g + i of a tile is at [i, g].
        as_rows = as_codes(scales).permute(5, 2, 1, 0, 4, 3).reshape(NUM_LOCAL, -1, hidden // 16)[:, :num_rows]
        assert_same_bits(as_rows.flatten(0, 1)[is_row], law.rows(rank, of_blocks)[is_row], f"scales of {case}")
        check_sums(buffer, case, handle, has_hook=has_hook, hidden=hidden)
        # Room for sums in 16 bits, not for the float32 rows that are quantised.
        capacity = handle.sent.comm.capacity
        assert capacity.max_bytes_per_token == 2 * hidden + 4 * capacity.num_topk
    buffer.destroy()


def waits_by_rank(group: dist.ProcessGroup, *, enable_shrink: bool) -> list[list[float]]:
    """Return the seconds that this rank waited for each, in dispatches and combines: rank 1 is late in both."""
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=enable_shrink)
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.arange(4).view(2, 2)
    given: dict[str, Any] = {"use_fp8": False}
    in_dispatch, in_combine = (torch.zeros(group.size(), dtype=torch.int64) for _ in range(2))
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, 4, **given)
    for _ in range(2):
        if buffer.rank == 1:
            time.sleep(0.3)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, 2, 4, dispatch_wait_recv_cost_stats=in_dispatch, **given
        )
    if buffer.rank == 1:
        time.sleep(0.3)
    sums, _, _ = buffer.low_latency_combine(
        rows, ids, torch.ones(2, 2), handle, combine_wait_recv_cost_stats=in_combine
    )
    assert torch.equal(sums, 2 * x)
    buffer.destroy()
    return [(each / 1e9).tolist() for each in (in_dispatch, in_combine)]


def as_codes(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one byte an element as bytes: PyTorch cannot index all of their dtypes."""
    return part.view(torch.uint8) if part.element_size() == 1 else part


def low_latency_refusals(group: dist.ProcessGroup) -> list[str]:
    """Return the texts of errors for calls that all ranks make; the buffer works afterwards."""
    buffer, other, texts = Buffer(group), Buffer(group), []
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.arange(4).view(2, 2)
    weights, stats = torch.ones(2, 2), torch.zeros(group.size(), group.size(), dtype=torch.int64)
    given: dict[str, Any] = {"use_fp8": False}

    def send(*arguments: Any, **changes: Any) -> Any:
        return buffer.low_latency_dispatch(*arguments, **given, **changes)

    rows, _, handle, _, _ = send(x, ids, 2, 4)
    for call in (
        lambda: send(x, ids, 1, 4),
        lambda: send(x, ids, 2, 5),
        lambda: send(x, ids, 2, 4, async_finish=True, return_recv_hook=True),
        lambda: send(x, ids, 2, 4, dispatch_wait_recv_cost_stats=stats.flatten()),
        lambda: buffer.low_latency_dispatch(x, ids, 2, 4, use_ue8m0=True),
        lambda: buffer.low_latency_dispatch(x, ids, 2, 4, use_nvfp4=True),
        lambda: send(x, ids, 2, 4, use_nvfp4=True),
        lambda: send(x, ids, 2, 4, use_nvfp4=True, x_global_scale=weights[0]),
        lambda: send(x, ids, 2, 4, use_nvfp4=True, use_ue8m0_for_sf=True),
        lambda: send(x, ids, 2, 4, topk_weights=weights[:1]),
        lambda: buffer.low_latency_combine(rows, ids.flip(0), weights, handle),
        lambda: buffer.low_latency_combine(rows, ids, weights[:1], handle),
        lambda: other.low_latency_combine(rows, ids, weights, (None, None)),
        lambda: buffer.low_latency_combine(rows, ids, weights, handle, zerocopy=True),
        lambda: buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, src_signals=stats),
        lambda: buffer.low_latency_update_mask_buffer(1, True),
        lambda: buffer.dispatch_pcie(x),
        lambda: buffer.get_local_buffer_tensor(torch.float32),
    ):
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    status = torch.ones(group.size(), dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    sums, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
    assert torch.equal(sums, 2 * x)
    buffer.destroy(), other.destroy()
    return texts

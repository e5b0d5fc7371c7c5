"""Functions on ranks: rows that are quantised where their tokens are, in every format and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from rank_setup import Setup, law_of, poison_recycler

import fusco
from comparison import assert_same_bits, assert_within, world_rows
from fusco import Quantize, StaticRows
from fusco.core.quantization import dequantize_rows, lay_out_scales, widened_scales
from generator import KINDS, any_bits, random_of, rows_to_quantize
from reference.quantize_rows import quantize_rows as reference

HIDDEN = 256


def check_quantized(group: dist.ProcessGroup, setup: Setup, formats: list[Quantize], dtype: torch.dtype) -> None:
    """Dispatch rows in each format: values and scales have the bits of the reference, in the layout asked for."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed, quantize in enumerate(formats):
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            law = law_of(comm, case, alignment=3)
            x = [rows_to_quantize(case.num_tokens(rank), HIDDEN, dtype, seed, rank) for rank in law.ranks]
            expected = [reference(rows, quantize) for rows in x]
            given = x[comm.rank].T.contiguous().T if seed % 2 else x[comm.rank]
            weights = case.topk_weights(comm.rank)
            sent = comm.dispatch(given, case.topk_idx(comm.rank), weights, expert_alignment=3, quantize=quantize)
            scales = law.rows(comm.rank, [each for _, each in expected])
            assert_same_bits(sent.rows, law.rows(comm.rank, [each for each, _ in expected]), "values")
            assert sent.scales is sent.payloads[1]
            _check_scales(sent.scales, scales, quantize)
            assert sent.rows.dtype == quantize.value_dtype
            back = dequantize_rows(sent.rows, scales, dataclasses.replace(quantize, layout="row"), dtype)
            assert_same_bits(_canonical(sent.dequantize()), _canonical(back), "dequantised")
            again = comm.dispatch_again(given.clone(), sent.handle, quantize=quantize)
            assert_same_bits(again[0], sent.rows, "values again")
            _check_scales(again[1], scales, quantize)
            assert again[1].stride() == sent.scales.stride()
            if setup.max_bytes_per_token >= HIDDEN * dtype.itemsize:
                (plain,) = comm.dispatch_again(given.contiguous(), sent.handle)
                assert_same_bits(plain, law.rows(comm.rank, x), "rows as they are")
            ones = torch.ones(len(sent.rows), 3)
            assert comm.combine(ones, sent.handle).shape == (case.num_tokens(comm.rank), 3)


def _check_scales(seen: torch.Tensor, expected: torch.Tensor, quantize: Quantize) -> None:
    if quantize.layout == "row":
        assert_same_bits(_canonical(seen), _canonical(expected), "scales")
        return
    if quantize.layout == "swizzled":
        assert_same_bits(seen.view(torch.uint8), lay_out_scales(expected, quantize, HIDDEN).view(torch.uint8), "scales")
        return
    assert seen.stride(0) == 1
    assert seen.stride(1) * seen.element_size() % 16 == 0
    wide = widened_scales(seen, quantize, HIDDEN)
    assert_same_bits(_canonical(wide), _canonical(expected.float()), "scales for TMA")


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats whose NaNs have the same bits, as their payload is nobody's choice."""
    wide = tensor.float() if tensor.is_floating_point() else tensor
    return torch.where(wide.isnan(), float("nan"), wide) if tensor.is_floating_point() else wide


def check_static(group: dist.ProcessGroup, setup: Setup) -> None:
    """Dispatch into static rows, also those of each expert, with scales for TMA."""
    quantize = Quantize(block=32, scale="ue8m0", layout="tma")
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        case = setup.case("ragged", 5, comm.topology.world_size)
        law = law_of(comm, case)
        x = [rows_to_quantize(case.num_tokens(rank), HIDDEN, torch.bfloat16, rank) for rank in law.ranks]
        expected = [reference(rows, quantize) for rows in x]
        num_rows = len(law.slots(comm.rank))
        static = StaticRows(num_rows + 5)
        sent = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank), static=static, quantize=quantize)
        assert_same_bits(sent.rows[:num_rows], law.rows(comm.rank, [each for each, _ in expected]), "values")
        assert sent.scales is not None
        assert sent.scales.shape == (num_rows + 5, HIDDEN // 32 // 4)
        wide = widened_scales(sent.scales, quantize, HIDDEN)[:num_rows]
        assert_same_bits(wide, law.rows(comm.rank, [each for _, each in expected]).float(), "scales")


def gradients(group: dist.ProcessGroup, setup: Setup, *, is_own_function: bool) -> list[torch.Tensor]:
    """Return gradients of x and weights through quantised rows, and through rows that were quantised before."""
    quantize = Quantize(block=32, straight_through=True)
    results = []
    with setup.open(group) as comm:
        case = setup.case("ragged with holes", 3, comm.topology.world_size, 4)
        for is_quantized in (True, False):
            x = torch.randn(case.num_tokens(comm.rank), HIDDEN, generator=random_of("x", comm.rank))
            weights = case.topk_weights(comm.rank).requires_grad_()
            if not is_quantized:
                x = dequantize_rows(*reference(x, quantize), quantize, torch.float32)
            x.requires_grad_()
            options: dict[str, Any] = {"quantize": quantize} if is_quantized else {}
            sent = comm.dispatch(x, case.topk_idx(comm.rank), weights, with_weights=True, **options)
            if is_quantized and is_own_function:
                assert sent.gradients is not None
                assert sent.gradients.untyped_storage().nbytes() == 4
                rows = _Experts.apply(sent.gradients, sent.rows, sent.scales)
            else:
                rows = (sent.dequantize() if is_quantized else sent.rows) * 3
            out = comm.combine(rows * sent.weights[:, None], sent.handle, weights=None)
            out.square().sum().backward()
            results += [out.detach(), x.grad, weights.grad]
    return results


class _Experts(torch.autograd.Function):
    """Experts that read values and scales: three times the rows."""

    @staticmethod
    def forward(ctx, gradients, values, scales):
        return dequantize_rows(values, scales, Quantize(block=32), gradients.dtype) * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None, None


def mistakes(group: dist.ProcessGroup, setup: Setup) -> list[str]:
    """Return the errors of rank 1's bad input on all ranks, and of options that differ; it stays usable."""
    errors = []
    with setup.open(group) as comm:
        case = setup.case("balanced", 1, comm.topology.world_size)
        ids, num_tokens = case.topk_idx(comm.rank), case.num_tokens(comm.rank)
        x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)
        is_wrong = comm.rank == 1

        def attempt(rows: Any, quantize: Any) -> None:
            try:
                comm.dispatch(rows, ids, quantize=quantize)
                errors.append("")
            except Exception as error:  # noqa: BLE001  compared by the test
                errors.append(f"{type(error).__name__}: {error}")

        attempt(x[:, :100] if is_wrong else x, Quantize())
        attempt(x.long() if is_wrong else x, Quantize())
        attempt([x, x] if is_wrong else x, Quantize())
        attempt(x, "fp8" if is_wrong else Quantize())
        attempt(x.requires_grad_() if is_wrong else x, Quantize())
        x = x.detach()
        attempt(x, Quantize("mxfp8", rounding="floor" if is_wrong else "ceil"))
        attempt(x, Quantize("nvfp4", global_scale=2.0 if is_wrong else 1.0))
        attempt(x, Quantize(straight_through=True))
        attempt(any_bits((num_tokens, HIDDEN), torch.float8_e4m3fn, 1), None)
    attempt(x, Quantize())
    return errors


def row_bytes_of(group: dist.ProcessGroup, setup: Setup) -> tuple[int, int]:
    """Return the bytes between nodes of a dispatch of bfloat16, and of the same quantised."""
    with setup.open(group) as comm:
        case = setup.case("balanced", 1, comm.topology.world_size)
        x = torch.ones(case.num_tokens(comm.rank), HIDDEN, dtype=torch.bfloat16)
        seen = []
        for quantize in (None, Quantize()):
            comm.dispatch(x, case.topk_idx(comm.rank), quantize=quantize)
            seen.append(comm.profile.internode_row_bytes)
    return seen[0], seen[1]


def narrow(setup: Setup) -> Setup:
    """Return the setup with room for quantised rows only."""
    return dataclasses.replace(setup, max_bytes_per_token=fusco.Quantize().row_bytes(HIDDEN))


def check_sums(group: dist.ProcessGroup, setup: Setup, dtype: torch.dtype) -> None:
    """Combine with sums that travel quantised: within the bound, and not without an error."""
    quantize = setup.settings.wire_dtype
    assert isinstance(quantize, Quantize)
    has_error = False
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed in range(len(KINDS)):
            case = setup.case(KINDS[seed], seed, comm.topology.world_size)
            law, weights = law_of(comm, case, alignment=2), case.world_topk_weights()
            y = world_rows(law, HIDDEN, dtype, seed)
            x = torch.zeros(case.num_tokens(comm.rank), 1)
            handle = comm.dispatch(x, case.topk_idx(comm.rank), weights[comm.rank], expert_alignment=2).handle
            out = comm.combine(y[comm.rank], handle)
            sums = law.sums(comm.rank, y, weights, comm.topology.rank_to_node)
            blocks = sums.remote_size.view(len(x), HIDDEN // quantize.columns, quantize.columns)
            largest = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(sums.exact.shape)
            scales = (comm.topology.num_nodes - 1) * 2 * largest / 448  # twice, if powers of two
            bound = law.error_bound(sums, dtype, torch.float32)
            bound = (bound + sums.remote_size / 16 + scales * 2**-10) * 1.01
            assert_within(out, sums.exact, bound, "combine")
            has_error |= bool(((out.double() - sums.exact).abs() > law.error_bound(sums, dtype, None)).any())
    assert has_error == (comm.topology.num_nodes > 1)


def check_bits_of_sums(group: dist.ProcessGroup, setup: Setup) -> None:
    """Combine rows of one expert for each token: those of another node are what the reference returns."""
    quantize = setup.settings.wire_dtype
    assert isinstance(quantize, Quantize)
    with setup.open(group) as comm:
        for seed in range(3):
            case = setup.case("ragged", seed, comm.topology.world_size, 1)
            law = law_of(comm, case)
            y = world_rows(law, HIDDEN, torch.bfloat16, seed)
            handle = comm.dispatch(torch.zeros(case.num_tokens(comm.rank), 1), case.topk_idx(comm.rank)).handle
            out, expected = comm.combine(y[comm.rank], handle), torch.zeros(case.num_tokens(comm.rank), HIDDEN)
            num_sent = 0
            for owner in law.ranks:
                for slot, pair in enumerate(law.slots(owner)):
                    is_remote = pair and comm.topology.rank_to_node[owner] != comm.topology.rank_to_node[pair.src]
                    num_sent += bool(is_remote and owner == comm.rank)
                    if pair and pair.src == comm.rank:
                        row = y[owner][slot : slot + 1].float()
                        travelled = dequantize_rows(*reference(row, quantize), quantize, torch.float32)
                        expected[pair.token] = travelled if is_remote else row
            assert_same_bits(out, expected.bfloat16(), "sums")
            assert comm.profile.internode_row_bytes == num_sent * quantize.row_bytes(HIDDEN)


def check_masked(group: dist.ProcessGroup, setup: Setup) -> None:
    """Dispatch into rows for each expert, as masked matrix products read them, with scales for TMA; combine them."""
    quantize, rows_per_expert = Quantize(block=32, layout="tma"), 4 * setup.max_tokens * setup.num_topk
    with setup.open(group) as comm:
        case = setup.case("ragged", 5, comm.topology.world_size)
        law, weights = law_of(comm, case), case.world_topk_weights()
        x = [rows_to_quantize(case.num_tokens(rank), HIDDEN, torch.bfloat16, rank) for rank in law.ranks]
        values, scales = zip(*(reference(rows, quantize) for rows in x), strict=True)
        sent = comm.dispatch(
            x[comm.rank],
            case.topk_idx(comm.rank),
            weights[comm.rank],
            static=StaticRows(rows_per_expert=rows_per_expert),
            quantize=quantize,
        )
        num_local = len(law.blocks(comm.rank))
        assert sent.rows.shape == (num_local, rows_per_expert, HIDDEN)
        assert sent.scales is not None
        assert sent.scales.shape == (num_local, rows_per_expert, HIDDEN // 32)
        assert sent.scales.stride()[1:] == (1, rows_per_expert)
        counts = sent.num_rows_per_expert.tolist()
        of_experts = [sent.rows[i, :count] for i, count in enumerate(counts)]
        assert_same_bits(torch.cat(of_experts), law.rows(comm.rank, values), "values")
        of_experts = [sent.scales[i, :count] for i, count in enumerate(counts)]
        seen, expected = torch.cat(of_experts), law.rows(comm.rank, scales)
        assert_same_bits(_canonical(seen), _canonical(expected), "scales")
        assert sent.dequantize().shape == sent.rows.shape
        ones = torch.ones(num_local, rows_per_expert, 2)
        expected = weights[comm.rank].float().where(case.topk_idx(comm.rank) >= 0, 0.0).sum(1, keepdim=True)
        torch.testing.assert_close(comm.combine(ones, sent.handle), expected.expand(-1, 2))

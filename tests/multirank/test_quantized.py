"""Quantised dispatch: values and scales on arrival, static rows, gradients, mistakes, bytes on links."""

from __future__ import annotations

import pytest
import quantized_jobs as jobs
import torch
from on_device import as_on_device
from rank_setup import Setup

from fusco import Quantize, Settings

pytestmark = pytest.mark.multirank

SETUP = Setup(
    ranks_per_node=2,
    num_experts=12,
    num_topk=4,
    max_bytes_per_token=1024,
    settings=Settings(timeout_s=60.0, slice_bytes=2000),
)
FORMATS = [
    Quantize(),
    Quantize(layout="tma"),
    Quantize(scale="power-of-two", layout="tma"),
    Quantize(scale="ue8m0"),
    Quantize(scale="ue8m0", layout="tma"),
    Quantize("mxfp8"),
    Quantize("mxfp8", rounding="floor", layout="tma"),
    Quantize("nvfp4"),
    Quantize("nvfp4", global_scale=0.002, layout="swizzled"),
]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, torch.float32), (2, torch.float32), (4, torch.bfloat16)], ids=str)
def test_values_and_scales_have_the_bits_of_the_reference(world, num_ranks, dtype):
    setup = Setup(**{**vars(SETUP), "ranks_per_node": min(num_ranks, 2)})
    world.run(jobs.check_quantized, num_ranks, setup, FORMATS, dtype)


def test_rows_that_are_not_attached_to_records(world):
    world.run(jobs.check_quantized, 4, Setup(**{**vars(SETUP), "max_tokens": 300}), FORMATS[:3], torch.float16)


@pytest.mark.cpu_only
def test_static_rows(world):
    world.run(jobs.check_static, 4, SETUP)


@pytest.mark.cpu_only
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_of_each_expert(world, num_ranks):
    world.run(jobs.check_masked, num_ranks, SETUP)


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_own_function", [False, True])
def test_gradients_go_straight_through(world, is_own_function):
    for results in world.run(jobs.gradients, 4, SETUP, is_own_function=is_own_function):
        for seen, expected in zip(results[:3], results[3:], strict=True):
            torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu_only
def test_mistakes_are_named_on_all_ranks(world):
    texts = [
        "rows to quantise must be (num_tokens, a multiple of 128), as each block of 'fp8_e4m3' has that many columns",
        "dispatch quantises torch.bfloat16, torch.float16, torch.float32, got torch.int64",
        "dispatch quantises one tensor of rows, got 2 payloads",
        "quantize must be a Quantize, got 'fp8'",
        "x requires gradients, which quantised rows have none of",
        "ranks disagree in dispatch: quantize is fp8",
        "ranks disagree in dispatch: quantize is nvfp4, nvfp4, 16, 1.0 on rank 0, nvfp4, nvfp4, 16, 2.0 on rank 1",
    ]
    for rank, errors in enumerate(world.run(jobs.mistakes, 2, SETUP)):
        *wrong, straight_through, not_quantized, closed = errors
        assert closed.startswith("ClosedError: dispatch was called on a communicator that cannot be used any more")
        assert not straight_through
        assert not not_quantized
        for i, (error, text) in enumerate(zip(wrong, texts, strict=True)):
            if i == 5:
                assert "mx-ceil" in error
                assert "mx-floor" in error
                continue
            assert text in error, error
            if i < 5:
                kind = ("ValueError", "TypeError") if rank == 1 else ("RejectedInputError",)
                assert error.startswith(kind), error


@pytest.mark.cpu_only
def test_links_carry_about_half_of_the_bytes(world):
    for plain, quantized in world.run(jobs.row_bytes_of, 4, SETUP):
        assert plain > 0
        assert quantized * 2 * jobs.HIDDEN == plain * Quantize().row_bytes(jobs.HIDDEN)


@pytest.mark.cpu_only
def test_gpu_tests_see_values_and_scales_as_they_are(world):
    world.run(as_on_device, 2, jobs.check_quantized, SETUP, FORMATS, torch.bfloat16)


def test_room_for_quantised_rows_is_enough(world):
    world.run(jobs.check_quantized, 2, jobs.narrow(SETUP), FORMATS[:1], torch.bfloat16)


SUMS = [Quantize(), Quantize(block=32, scale="power-of-two")]


def with_sums(quantize: Quantize, **changes) -> Setup:
    settings = Settings(timeout_s=60.0, slice_bytes=5000, wire_dtype=quantize)
    return Setup(**{**vars(SETUP), "settings": settings, **changes})


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "quantize"), [(2, 2, SUMS[0]), (2, 1, SUMS[1]), (4, 2, SUMS[1]), (6, 2, SUMS[0])]
)
def test_sums_that_travel_quantised_are_within_their_bound(world, num_ranks, ranks_per_node, quantize):
    world.run(jobs.check_sums, num_ranks, with_sums(quantize, ranks_per_node=ranks_per_node), torch.bfloat16)


@pytest.mark.cpu_only
def test_sums_that_are_not_attached_to_records(world):
    world.run(jobs.check_sums, 4, with_sums(SUMS[0], max_tokens=300, balancer="scattered"), torch.float32)


@pytest.mark.cpu_only
@pytest.mark.parametrize("max_tokens", [24, 300])
def test_bits_of_sums_that_travel_quantised(world, max_tokens):
    world.run(jobs.check_bits_of_sums, 2, with_sums(SUMS[0], ranks_per_node=1, max_tokens=max_tokens))

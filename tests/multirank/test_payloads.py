"""Rows of all dtypes, shapes and strides; several payloads at once; weights of all dtypes."""

from __future__ import annotations

import payload_jobs as jobs
import pytest
import torch
from rank_setup import Setup

from fusco import Settings

pytestmark = pytest.mark.multirank

SETTINGS = Settings(timeout_s=60.0, slice_bytes=1)
SETUP = Setup(ranks_per_node=2, num_experts=12, num_topk=4, balancer="scattered", settings=SETTINGS)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def test_every_dtype_in_odd_widths(world):
    world.run(jobs.check_payload, 4, SETUP, [(1,), (3,), (5,), (17,)], DTYPES)


def test_rows_of_one_or_several_dimensions(world):
    world.run(jobs.check_payload, 4, SETUP, [(), (2, 3), (1, 1, 1), (2, 1, 3, 2)], [torch.uint8, torch.bfloat16])


@pytest.mark.parametrize("layout", [jobs.transposed, jobs.every_other_row, jobs.with_gaps, jobs.expanded])
def test_rows_that_are_not_contiguous(world, layout):
    world.run(jobs.check_payload, 4, SETUP, [(3,), (17,), (2, 3)], [torch.uint8, torch.float32], layout)


@pytest.mark.parametrize("layout", [jobs.conjugated, jobs.negated])
def test_rows_that_are_lazily_conjugated_or_negated(world, layout):
    world.run(jobs.check_payload, 4, SETUP, [(3,)], [torch.float32], layout)


def test_rows_as_wide_as_the_communicator_takes(world):
    world.run(jobs.check_payload, 4, SETUP, [(256,)], [torch.uint8])


def test_several_payloads_share_a_routing(world):
    world.run(jobs.check_several_payloads, 4, SETUP)


def test_sums_of_odd_widths_not_contiguous(world):
    world.run(jobs.check_combine_layouts, 4, SETUP, [1, 3, 5, 17, 32])


def test_weights_of_every_dtype(world):
    world.run(jobs.check_weights, 4, SETUP)

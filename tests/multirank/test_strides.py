"""Tensors of no element or one are contiguous with any strides, and are sent like all others."""

from __future__ import annotations

import pytest
import stride_jobs as jobs
from rank_setup import Setup

pytestmark = pytest.mark.multirank


@pytest.fixture(params=[1, 2])
def setup(request):
    return Setup(ranks_per_node=request.param, num_experts=2, num_topk=1)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_column_of_scales_with_rows(world, setup, num_rows):
    scales = [1.0] + [2.0] * num_rows
    assert world.run(jobs.dispatch_columns, 2, setup, num_rows) == [[scales, scales], [[], []]]


def test_gradients_of_one_value(world, setup):
    assert world.run(jobs.combine_with_gradients, 2, setup) == [[2.0, 1.0, 2.0, 3.0]] * 2


def test_bytes_of_one_element(world, setup):
    assert world.run(jobs.move_bytes, 2, setup) == [[[]], [[7.0], [8.0], [9.0]]]

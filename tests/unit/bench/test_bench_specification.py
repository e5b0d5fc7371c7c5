"""The benchmark's specification: correct results pass, and every kind of wrong one is found."""

import pytest
import torch

from fusco.bench.inputs.traffic import WorldInput
from fusco.bench.shuffle.verification import apply_experts, combine_error, expected_rows

WORLD = WorldInput(
    rows=[torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])],
    topk_idx=[torch.tensor([[1, 0], [1, -1]]), torch.tensor([[0, 1]])],
    topk_weights=[torch.tensor([[0.5, 0.5], [1.0, 1.0]]), torch.tensor([[0.25, 0.75]])],
)


def test_rows_by_hand():
    rows, counts = expected_rows(WORLD, [0, 1])
    assert rows.squeeze(1).tolist() == [1.0, 3.0, 1.0, 2.0, 3.0]
    assert counts == [2, 3]


def test_combine_by_hand():
    # Expert 0 multiplies by 1, expert 1 by 1.125.
    rows, counts = expected_rows(WORLD, [0, 1])
    assert apply_experts(rows, counts, [0, 1]).squeeze(1).tolist() == [1.0, 3.0, 1.125, 2.25, 3.375]
    right = torch.tensor([[0.5 * 1.125 + 0.5], [2.25]])
    assert combine_error(WORLD, 0, right) <= 1.0


@pytest.mark.parametrize("wrong", [[[1.0], [2.25]], [[1.0625], [0.0]], [[1.0625], [float("nan")]]])
def test_a_wrong_sum_is_caught(wrong):
    assert combine_error(WORLD, 0, torch.tensor(wrong)) > 1.0


def test_a_sum_whose_parts_travel_twice_may_be_rounded_thrice():
    token = WorldInput([torch.tensor([[1.0]]).bfloat16()], [torch.tensor([[0]])], [torch.tensor([[1.0]])])
    three_half_ulps = torch.tensor([[1.0 + 3 / 256]], dtype=torch.float64)
    assert combine_error(token, 0, three_half_ulps, num_roundings=2) == 1.5
    assert combine_error(token, 0, three_half_ulps, num_roundings=3) == 1.0

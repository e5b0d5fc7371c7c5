"""Validation of a routing."""

import pytest
import torch

from fusco.planner.routing import Routing


def test_ids_up_to_the_last_expert_and_minus_one_are_accepted():
    Routing(torch.tensor([[0, 3], [-1, 2]])).check_expert_ids(4)
    Routing(torch.empty(0, 2, dtype=torch.int32)).check_expert_ids(4)
    Routing(torch.empty(2, 0, dtype=torch.int32)).check_expert_ids(4)


@pytest.mark.parametrize("expert", [4, -2, 1 << 40])
def test_the_error_has_the_first_invalid_id_and_its_indices(expert):
    ids = torch.tensor([[0, 1], [2, expert], [expert, 0]])
    with pytest.raises(ValueError, match=rf"topk_idx\[1, 1\] = {expert} .* 0 to 3"):
        Routing(ids).check_expert_ids(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_ids_must_be_integers_of_32_or_64_bits(dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        Routing(torch.zeros(2, 2, dtype=dtype))


def test_shapes_and_dtypes_of_weights():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert Routing(ids, torch.zeros(2, 3, dtype=torch.bfloat16)).num_topk == 3
    with pytest.raises(TypeError, match=r"torch\.int64"):
        Routing(ids, torch.zeros(2, 3, dtype=torch.int64))
    allowed = "must be one of float16, bfloat16, float32, float64, got torch.float8_e4m3fn"
    with pytest.raises(TypeError, match=allowed):
        Routing(ids, torch.zeros(2, 3, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(2, 3\)"):
        Routing(ids, torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        Routing(ids[:, 0])

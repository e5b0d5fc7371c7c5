"""Norms and clipping of plain parameters are those of PyTorch."""

import math

import pytest
import torch
from torch import nn

from fusco.fsdp import clip_grad_norm_, grad_norm


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2), (0,))]
    for parameter in (made[0], made[1], made[3]):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.25, 100.0])
def test_as_torch_clips(p, max_norm):
    ours, theirs = parameters(), parameters()
    # Without the empty one, which has no largest value.
    expected = nn.utils.clip_grad_norm_(theirs[:3], max_norm, p)
    norm = clip_grad_norm_(ours, max_norm, p)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad)


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0).item() == 0
    assert grad_norm([nn.Parameter(torch.ones(3))]).item() == 0


def test_norms_that_are_no_numbers():
    broken = parameters()
    broken[1].grad[0] = math.nan
    assert math.isnan(grad_norm(broken))
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is nan"):
        clip_grad_norm_(broken, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be positive, got 0"):
        grad_norm(broken, 0)


def test_one_parameter_may_come_by_itself_as_in_torch():
    ours, theirs = parameters()[0], parameters()[0]
    assert grad_norm(ours) == clip_grad_norm_(ours, 0.25)
    nn.utils.clip_grad_norm_(theirs, 0.25)
    torch.testing.assert_close(ours.grad, theirs.grad)

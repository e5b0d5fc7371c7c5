"""Each matrix of a stack is updated as ``torch.optim.Muon`` updates it alone."""

import pytest
import torch
from torch import nn

from fusco.fsdp import ExpertMuon
from fusco.fsdp.expert_muon import orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 12), (3, 24, 6), (1, 5, 5), (0, 4, 6)])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_a_stack_is_updated_as_its_matrices(shape, options):
    generator = torch.Generator().manual_seed(1)
    stack = nn.Parameter(torch.randn(shape, generator=generator))
    matrices = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    ours = ExpertMuon([stack], lr=0.1, **options)
    theirs = [torch.optim.Muon([matrix], lr=0.1, **options) for matrix in matrices]
    for _ in range(4):
        stack.grad = torch.randn(shape, generator=generator)
        before = stack.detach().clone()
        ours.step()
        for index, optimizer in enumerate(theirs):
            matrices[index].grad = stack.grad[index].clone()
            optimizer.step()
        for index, matrix in enumerate(matrices):
            size = (matrix.detach() - before[index]).norm()
            assert (stack[index] - matrix).norm() < 0.02 * size  # products in bfloat16, rounded in another order
            assert size > 0.1


def test_singular_values_are_near_one():
    stack = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(stack, (3.4445, -4.7750, 2.0315), 5).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_what_is_no_stack_is_rejected():
    with pytest.raises(ValueError, match=r"got one of shape \(3, 4\): torch.optim.Muon takes matrices"):
        ExpertMuon([nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(ValueError, match=r"adjust_lr_fn must be one of .*, got 'rms'"):
        ExpertMuon([nn.Parameter(torch.zeros(3, 4, 4))], adjust_lr_fn="rms")


def test_parameters_without_a_gradient_are_left():
    stack = nn.Parameter(torch.ones(2, 3, 3))
    optimizer = ExpertMuon([stack])
    assert optimizer.step(lambda: 5) == 5
    assert torch.equal(stack, torch.ones(2, 3, 3))
    assert not optimizer.state

"""The mean over all tokens, without ranks."""

import importlib

import pytest
import torch

grad_norm = importlib.import_module("fusco.fsdp.grad_norm")  # whose function of the same name hides it


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [(torch.float16, 131_072), (torch.bfloat16, 131_071), (torch.float32, 131_071), (torch.float64, 131_071)],
)
def test_counts_are_not_rounded_to_the_dtype_of_the_loss(monkeypatch, dtype, num_tokens):
    """131072 is infinite in float16, and 131071 is 131072 in bfloat16."""
    monkeypatch.setattr(grad_norm, "global_sum", lambda value, mesh: torch.tensor(value, dtype=torch.float64))
    loss_sum = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    mean = grad_norm.scale_loss(loss_sum, num_tokens, mesh=None)
    mean.backward()
    assert mean.item() == pytest.approx(3 / num_tokens, rel=1e-7)
    assert loss_sum.grad.dtype == dtype

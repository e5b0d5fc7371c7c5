"""The loss that balances routers is that of transformers on one rank."""

from __future__ import annotations

import importlib

import pytest
import torch

from fusco.fsdp.transformers_integration import RouterLosses, _is_known, balance_loss

MODELING = "transformers.models.qwen3_moe.modeling_qwen3_moe"


def test_by_hand():
    """Two tokens, two experts, top-1: both go to expert 0, whose mean probability is 0.75."""
    logits = (torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(),)
    assert balance_loss(logits, 2, 1).item() == pytest.approx(2 * (1.0 * 0.75 + 0.0 * 0.25))
    assert balance_loss(logits, 2, 1, torch.tensor([[0, 1]])).item() == pytest.approx(2.0)


def test_as_transformers():
    pytest.importorskip("transformers")
    theirs = importlib.import_module(MODELING).load_balancing_loss_func
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    for attention_mask in (None, mask):
        grads = []
        for function in (theirs, balance_loss):
            torch.manual_seed(0)
            logits = tuple(torch.randn(8, 6, requires_grad=True) for _ in range(3))
            loss = function(logits, 6, 2, attention_mask)
            loss.backward()
            grads.append((loss.detach(), *(each.grad for each in logits)))
        torch.testing.assert_close(*grads)
    assert _is_known(theirs)
    assert not _is_known(lambda *args: 2 * theirs(*args))


def test_the_loss_is_restored_and_that_of_other_models_stays():
    pytest.importorskip("transformers")
    module = importlib.import_module(MODELING)
    theirs, losses = module.load_balancing_loss_func, RouterLosses()
    config = importlib.import_module("transformers").Qwen3MoeConfig(
        hidden_size=8, moe_intermediate_size=8, num_experts=4
    )
    logits = (torch.randn(3, 4),)
    with losses.restored():
        losses.watch(module.Qwen3MoeExperts(config))
        assert module.load_balancing_loss_func is not theirs
        assert torch.equal(module.load_balancing_loss_func(logits, 4, 2), theirs(logits, 4, 2))
    assert module.load_balancing_loss_func is theirs

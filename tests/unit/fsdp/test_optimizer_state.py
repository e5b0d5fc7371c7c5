"""Optimizer state before loading, and steps."""

import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusco.fsdp.checkpoint import (
    drop_state,
    fill_state,
    find_unstarted,
    parameters_named,
    without_empty_groups,
    without_state,
)
from fusco.fsdp.parallelize import refuse_unsharded_optimizers

OPTIONS = ["param_groups.a.weight.lr", "param_groups.b.weight.lr"]
MOMENTS = ["state.a.weight.step", "state.a.weight.exp_avg"]


def make_model():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_only_parameters_without_a_state_get_one(rate):
    model = make_model()
    a, b = model["a"].weight, model["b"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    a.grad = torch.ones(2, 2)
    optimizer.step()
    weights, moments = [each.detach().clone() for each in (a, b)], optimizer.state[a]["exp_avg"].clone()
    assert b not in optimizer.state
    assert fill_state(optimizer) == [b]
    assert optimizer.state[b]["exp_avg"].tolist() == [[0, 0], [0, 0]]
    assert torch.equal(optimizer.state[a]["exp_avg"], moments)
    assert optimizer.state[a]["step"] == 1
    assert [torch.equal(each, weight) for each, weight in zip((a, b), weights, strict=True)] == [True, True]
    assert torch.equal(a.grad, torch.ones(2, 2))
    assert b.grad is None
    assert optimizer.param_groups[0]["lr"] == rate
    assert fill_state(optimizer) == []
    drop_state(optimizer, [b])
    assert b not in optimizer.state


def test_a_step_that_raises_changes_nothing():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model["a"].weight.grad = gradient = torch.ones(2, 2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for moments")

    failing = optimizer.register_step_post_hook(fail)  # after the first moments
    with pytest.raises(torch.OutOfMemoryError):
        fill_state(optimizer)
    failing.remove()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model["a"].weight.grad is gradient
    assert model["b"].weight.grad is None
    assert not optimizer.state
    assert len(fill_state(optimizer)) == 2


def test_frozen_parameters_get_none():
    model = make_model()
    model["b"].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert fill_state(optimizer) == [model["a"].weight]
    assert model["b"].weight not in optimizer.state


def test_parameters_without_any_state_in_the_checkpoint_never_had_a_gradient():
    wanted = [*OPTIONS, *MOMENTS, "state.b.weight.step", "state.b.weight.exp_avg"]
    assert find_unstarted(wanted, [*OPTIONS, *MOMENTS]) == {"b.weight"}
    assert find_unstarted(wanted, OPTIONS) == {"a.weight", "b.weight"}
    assert find_unstarted(wanted, wanted) == set()
    # Frozen since.
    assert find_unstarted([*OPTIONS, *MOMENTS], wanted) == set()


@pytest.mark.parametrize(
    ("wanted", "saved", "text"),
    [
        ([*OPTIONS, *MOMENTS], [OPTIONS[0], *MOMENTS], r"has no lr for parameter b\.weight: it was of another kind"),
        (
            [*OPTIONS, *MOMENTS],
            [*OPTIONS, "state.a.weight.momentum_buffer"],
            r"has momentum_buffer for parameter a\.weight, and this one exp_avg, step: it was of another kind",
        ),
        (OPTIONS, [*OPTIONS, *MOMENTS], r"has exp_avg, step for parameter a\.weight, and this one nothing"),
        ([*OPTIONS, *MOMENTS], [*OPTIONS, MOMENTS[0]], r"has step for parameter a\.weight, and this one exp_avg, step"),
    ],
)
def test_optimizers_of_another_kind(wanted, saved, text):
    with pytest.raises(ValueError, match=text):
        find_unstarted(wanted, saved)


def test_names_of_parameters():
    model = make_model()
    assert parameters_named(model, {"b.weight"}) == [model["b"].weight]
    state = dict.fromkeys([*OPTIONS, *MOMENTS, "state.b.weight.nested.step"], 0)
    assert list(without_state(state, {"b.weight"})) == [*OPTIONS, *MOMENTS]
    # As torch.compile wraps modules.
    wrapped = nn.ModuleDict({"a": nn.ModuleDict({"_orig_mod": model["a"]})})
    assert parameters_named(wrapped, {"a.weight"}) == [model["a"].weight]


def test_groups_without_parameters_are_put_back_in_place():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [], "lr": 1.0}, {"params": [weight], "lr": 2.0}, {"params": []}], lr=3.0)
    with without_empty_groups(optimizer):
        assert [group["lr"] for group in optimizer.param_groups] == [2.0]
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 5.0
        optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 5.0, 3.0]
    assert optimizer.param_groups[1]["params"] == [weight]


def test_a_model_may_end_during_a_step():
    """Of any optimizer: PyTorch goes through the hooks of all models meanwhile."""
    models = [nn.Linear(2, 2)]
    ended = weakref.ref(models[0])
    handle = register_optimizer_step_pre_hook(lambda *_: models.clear())
    try:
        refuse_unsharded_optimizers(models[0])
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert ended() is None

"""A forward pass without gradients, wherever it is, leaves training what it was."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_evaluation_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

ATOL = 1e-5  # of parameters after a step of at most 0.5


@pytest.mark.parametrize(
    ("when", "how", "reshard_after_forward"),
    [
        *((when, "no grad", True) for when in jobs.WHENS),
        *((when, "no grad", False) for when in jobs.WHENS[::2]),
        ("before the optimizer is made", "generate", True),
        ("before gradients are clipped", "generate", True),
        ("before the optimizer is made", "inference mode", True),
        ("before gradients are clipped", "inference mode", True),
    ],
)
def test_an_evaluation_leaves_training_as_it_is(two, when, how, reshard_after_forward):
    for differences in two.run(jobs.differences_of_evaluated_training, when, how, reshard_after_forward):
        assert max(differences.values()) < ATOL, differences


def test_gradients_that_a_norm_would_leave_out_are_an_error(two):
    for text in two.run(jobs.error_of_a_norm_after_a_discarded_forward_pass):
        assert text == (
            "3 of 25 parameters are whole copies without gradients, as after a forward pass without its backward pass: "
            "evaluate in torch.no_grad(), after which they are sharded again"
        )


def test_adapters_on_dense_layers_train_where_experts_are_frozen(two):
    for differences in two.run(jobs.differences_with_adapters):
        assert len(differences) == 4  # two layers, two matrices
        assert max(differences.values()) < 5e-6, differences

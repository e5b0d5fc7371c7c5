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
        *((when, "no grad", False) for when in jobs.WHENS),
        ("before the optimizer is made", "generate", True),
        ("before gradients are clipped", "generate", True),
        ("before the optimizer is made", "inference mode", True),
        ("before gradients are clipped", "inference mode", True),
    ],
)
def test_an_evaluation_leaves_training_as_it_is(two, when, how, reshard_after_forward):
    for differences in two.run(jobs.differences_of_evaluated_training, when, how, reshard_after_forward):
        assert max(differences.values()) < ATOL, differences

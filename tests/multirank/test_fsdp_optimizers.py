"""Optimizers of PyTorch on a parallelized model: the table of docs/training/runs.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_metrics_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

PAGE = Path(__file__).parents[2] / "docs" / "training" / "runs.md"
ROWS = re.findall(r"^\| `torch\.optim\.(\w+)`(?:, (\w+))? \| (works|fails) \|", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_a_table():
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("kind", "implementation", "outcome"), ROWS)
def test_an_optimizer_does_what_the_page_says(four, kind, implementation, outcome):
    for error, difference in four.run(jobs.train_by, f"{kind}, {implementation}" if implementation else kind):
        if outcome == "works":
            assert not error
            assert difference < 1e-2  # of a step that is normalised by gradients which differ by rounding
        else:
            assert f"torch.optim.{kind}" in error
            assert "AdamW" in error  # the way out


def test_muon_takes_each_expert_as_a_matrix(four):
    for differences in four.run(jobs.train_experts_by_muon, 2, expert_dim=0):
        assert len(differences) == 4
        assert max(differences.values()) < 0.02, differences  # products in bfloat16, rounded in another order


def test_muon_needs_whole_experts(four):
    for error in four.run(jobs.train_experts_by_muon, 2, expert_dim=1):
        assert "parallelize with Sharding(expert_dim=0)" in error

"""Snippets of docs/training/runs.md run, each after the one before, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_metrics_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

PAGE = Path(__file__).parents[2] / "docs" / "training" / "runs.md"


def test_the_snippets_run(two, tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    for shown in two.run(jobs.run_snippets, snippets, tmp_path):
        assert "LoadSummary(busiest=" in shown
        assert "step 1  loss " in shown
    assert (tmp_path / "run" / "latest").read_text() == "step-00000004\n"

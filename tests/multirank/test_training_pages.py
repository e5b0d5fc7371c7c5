"""Snippets of the pages in docs/training run, each after the one before, on two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_metrics_jobs as jobs
from fsdp_models import make_model

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

PAGES = Path(__file__).parents[2] / "docs" / "training"


def snippets_of(page):
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_snippets_run(two, tmp_path):
    snippets = snippets_of("runs.md")
    assert len(snippets) == 4
    for shown in two.run(jobs.run_snippets, snippets, tmp_path):
        assert "LoadSummary(busiest=" in shown
        assert "step 1  loss " in shown
    assert (tmp_path / "run" / "latest").read_text() == "step-00000004\n"


def test_the_snippets_of_lora_run(two, tmp_path):
    pytest.importorskip("peft", reason="adapters need peft")
    snippets = snippets_of("lora.md")
    assert len(snippets) == 4
    make_model("qwen3").save_pretrained(tmp_path / "base")
    two.run(jobs.run_lora_snippets, snippets, tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "whole" / "model.safetensors").exists()


def test_the_snippets_of_trainer_run(two, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23")
    import fsdp_trainer_jobs as trainer_jobs  # noqa: PLC0415  needs accelerate

    *snippets, _, _ = snippets_of("trainer.md")
    assert len(snippets) == 2
    make_model("qwen3").save_pretrained(tmp_path / "base")
    for history in two.run(trainer_jobs.run_snippets, snippets, tmp_path):
        assert [each["step"] for each in history if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "latest").read_text() == "step-00000006\n"
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "qwen3_moe"


@pytest.mark.parametrize("number", [-2, -1], ids=["Lightning", "Fabric"])
def test_the_snippets_of_lightning_are_exact(four, number):
    pytest.importorskip("accelerate", reason="the jobs of Trainer need accelerate")
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    import fsdp_trainer_jobs as trainer_jobs  # noqa: PLC0415  needs accelerate

    snippet = snippets_of("trainer.md")[number]
    assert max(four.run(trainer_jobs.difference_of_lightning, snippet)) < 1e-5  # three steps move them by 3e-2

"""Parameters and optimizer in main memory, by FSDP2's policy: as on GPUs, where they would otherwise be."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_jobs as jobs
from fsdp_models import make_model
from fsdp_runs import Run

pytestmark = pytest.mark.multirank


def test_parameters_and_the_optimizer_are_offloaded(two):
    """On CPU ranks FSDP has nothing to move."""
    for differences in two.run(jobs.differences_of_offloaded_training, Run(nums_sequences=(2, 1))):
        assert all(difference < 1e-4 for difference in differences.values()), differences


def test_an_offloaded_model_is_filled_and_written(two, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    assert two.run(jobs.offloaded_from_meta, tmp_path) == [{"cpu"}] * 2
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

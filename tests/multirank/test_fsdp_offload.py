"""Parameters and optimizer in main memory, by FSDP2's policy: as on GPUs, where they would otherwise be."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_jobs as jobs
from fsdp_models import make_model
from fsdp_runs import Run
from safetensors.torch import load_file

pytestmark = pytest.mark.multirank


def test_parameters_and_the_optimizer_are_offloaded(two):
    """On CPU ranks FSDP has nothing to move."""
    run = Run(nums_sequences=(2, 1))
    kept, offloaded = (
        two.run(job, run, 3)[0] for job in (jobs.differences_of_training, jobs.differences_of_offloading)
    )
    assert offloaded == (kept if two.device == "cpu" else pytest.approx(kept, abs=1e-3))  # steps move weights by 3e-2


def test_an_offloaded_model_is_filled_and_written(two, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    assert two.run(jobs.offloaded_from_meta, tmp_path) == [{"cpu"}] * 2
    plain, again = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())

"""Environment in the record of a run."""

import dataclasses
import json

import pytest
import torch
from test_job import make_job

from fusco.bench.train.records import Run, StepRecord, summarize
from fusco.fsdp import LoadSummary, StepMetrics

pytest.importorskip("transformers", reason="its version is in the record")

TIMES = ("dispatch_ms", "combine_ms", "dispatch_backward_ms", "combine_backward_ms")


def make_run(num_steps):
    steps = [
        StepRecord(
            dispatcher="fusco",
            step=step,
            loss=3.0 - step,
            gradient_norm=1.0,
            step_ms=10.0,
            tokens_per_s=100,
            shuffle_share=0.4,
            expert_imbalance=1.0,
            load_cv=0.0,
            num_idle_experts=0,
            waiting_share=0.1,
            learning_rate=1e-3,
            memory_gib=0.5,
            **dict.fromkeys(TIMES, 1.0),
        )
        for step in range(num_steps)
    ]
    return Run(steps, num_parameters=5, peak_memory_bytes=0, routing=None)


def test_a_run_names_its_gpu_and_transformers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
    (record,) = summarize(make_job(device="cuda"), [make_run(2)])
    assert record.hardware["gpu"] == "some GPU"
    assert record.versions["transformers"]


def test_a_run_on_the_cpu_names_no_gpu():
    (record,) = summarize(make_job(), [make_run(2)])
    assert "gpu" not in record.hardware


def test_a_step_has_the_load_of_each_layer():
    names = ("loss", "gradient_norm", "learning_rate", "step_ms", "tokens_per_s", "memory_gib", "busiest_expert")
    numbers = dict.fromkeys((*names, "load_cv", "num_idle_experts", "shuffle_share", "waiting_share"), 1.0)
    times = {name.removesuffix("_ms"): 1.0 for name in TIMES}
    layers = {"model.layers.0.mlp.experts": LoadSummary(busiest=2.0, cv=0.5, num_idle=1)}
    step = StepRecord.of("fusco", StepMetrics(step=1, mfu=0.25, section_ms=times, layers=layers, **numbers), None)
    written = json.loads(json.dumps(dataclasses.asdict(step)))
    assert written["mfu"] == 0.25
    assert written["layers"] == {"model.layers.0.mlp.experts": {"busiest": 2.0, "cv": 0.5, "num_idle": 1}}


@pytest.mark.parametrize("held_out", [None, 12.345])
def test_a_step_fits_into_80_columns(held_out):
    """With a million tokens a second at step 99,999."""
    (step,) = make_run(1).steps
    large = {"step": 99_998, "loss": 12.345, "tokens_per_s": 1_234_567, "expert_imbalance": 16.0, "shuffle_share": 1.0}
    text = dataclasses.replace(step, **large, held_out_loss=held_out).describe()
    assert len(text) <= 80
    assert all(word in text for word in ("99999", "12.345", "1,234,567 tokens/s", "16.00x"))

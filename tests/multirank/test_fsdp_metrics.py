"""Metrics of a step are those of all ranks, and reach files."""

from __future__ import annotations

import csv
import json

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_metrics_jobs as jobs
from fsdp_models import SEQUENCE, make_model

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

NUM_LAYERS, NUM_EXPERTS, NUM_TOPK = 2, 8, 3


def test_a_step_is_measured_and_written(four, tmp_path):
    first, *others = four.run(jobs.measured, tmp_path)
    for other in others:
        assert [each.loss for each in other] == [each.loss for each in first]
        assert [each.layers for each in other] == [each.layers for each in first]
    one, two = first
    assert (one.step, two.step, one.learning_rate) == (1, 2, 0.25)
    assert two.loss < one.loss
    assert one.gradient_norm > 0
    assert 0 < one.waiting_share < one.shuffle_share < 1
    assert one.memory_gib > 0.05
    assert len(one.layers) == NUM_LAYERS
    num_tokens = 4 * 2 * 2 * SEQUENCE
    assert one.tokens_per_s == pytest.approx(num_tokens / one.step_ms * 1e3)
    dense = sum(p.numel() for name, p in make_model("qwen3").named_parameters() if is_dense(name) and p.ndim > 1)
    of_expert = 3 * 16 * 8
    flops = 6 * num_tokens * (dense + NUM_LAYERS * NUM_TOPK * of_expert)
    assert one.mfu == pytest.approx(flops / (one.step_ms / 1e3) / 4e9)
    assert len(one.describe()) <= 80
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [one.loss, two.loss]
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (
        float(rows[1]["layers/model.layers.0.mlp.experts/busiest"]) == two.layers["model.layers.0.mlp.experts"].busiest
    )


def is_dense(name):
    return ".experts." not in name and "embed_tokens" not in name

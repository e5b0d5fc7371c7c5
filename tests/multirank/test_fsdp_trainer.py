"""transformers' Trainer with models of ``registered_with_transformers``: exact, and continued bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers distributes experts by name from 5.23 on"
)

import fsdp_trainer_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}])
def test_loss_norm_and_evaluation_are_those_of_one_process(two, one, tmp_path, changes):
    jobs.write_model(tmp_path / "model")
    (expected,) = one.run(jobs.logs_of_training, tmp_path / "model", tmp_path / "one", **changes)
    assert len(expected) == 8
    for logs in two.run(jobs.logs_of_training, tmp_path / "model", tmp_path / "two", **changes):
        assert len(logs) == len(expected)
        for log, wanted in zip(logs, expected, strict=True):
            assert log == pytest.approx(wanted, rel=2e-6)


def test_the_router_loss_is_that_of_all_ranks(two, one, tmp_path):
    """Trainer multiplies it by the number of ranks, so the coefficient is divided by it."""
    for name, coefficient in (("one", 0.5), ("two", 0.25)):
        jobs.write_model(tmp_path / name, output_router_logits=True, router_aux_loss_coef=coefficient)
    (expected,) = one.run(jobs.logs_of_training, tmp_path / "one", tmp_path / "trainer", max_steps=3)
    for logs in two.run(jobs.logs_of_training, tmp_path / "two", tmp_path / "trainer", max_steps=3):
        for log, wanted in zip(logs[:3], expected[:3], strict=True):
            assert log == pytest.approx(wanted, rel=2e-6)


def test_trl_is_exact_with_its_router_loss(two, one, tmp_path):
    pytest.importorskip("trl", reason="needs TRL: pip install trl")
    jobs.write_model(tmp_path / "model", output_router_logits=True, router_aux_loss_coef=0.5)
    jobs.write_tokenizer(tmp_path / "model")
    (expected,) = one.run(jobs.logs_of_trl, tmp_path / "model", tmp_path / "one")
    assert len(expected) == 7
    for logs in two.run(jobs.logs_of_trl, tmp_path / "model", tmp_path / "two"):
        for log, wanted in zip(logs, expected, strict=True):
            assert log == pytest.approx(wanted, rel=2e-6)
    whole, parts = (two.run(jobs.logs_of_trl, tmp_path / "model", tmp_path / "run", *each) for each in ((), (3,)))
    assert whole == parts


def test_a_run_continues_bit_for_bit(two, tmp_path):
    """Interrupted within an epoch, and at its end; with dropout, and shuffled data."""
    jobs.write_model(tmp_path / "model", attention_dropout=0.2)
    options = {
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    whole = two.run(jobs.weights_of_run, tmp_path / "model", tmp_path / "whole", (), **options)
    parts = two.run(jobs.weights_of_run, tmp_path / "model", tmp_path / "parts", (2, 3), **options)
    for (weights, log), (expected, expected_log) in zip(parts, whole, strict=True):
        assert log == expected_log
        assert len(log) == 7
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name
    steps = sorted(path.name for path in (tmp_path / "parts" / "run").iterdir())
    assert steps == ["latest", "step-00000006", "step-00000007"]


def test_a_trainer_that_cannot_be_continued_is_refused(two, tmp_path):
    jobs.write_model(tmp_path / "model")
    for unstarted, unknown in two.run(jobs.errors_of_checkpoints, tmp_path / "model", tmp_path):
        assert unstarted.startswith("TrainerCheckpoint continues runs only if it starts them")
        assert unknown.startswith("this version of transformers has no Trainer._load_rng_state")

"""A checkpoint of four ranks loads anywhere else, bit for bit, and training goes on as it would have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'fusco[fsdp]'")

import fsdp_checkpoint_jobs as jobs
import transformers
from fsdp_jobs import Run

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def assert_same(ours, theirs):
    assert ours.now.keys() == theirs.now.keys()
    assert any("exp_avg" in name for name in ours.now)
    for name, tensor in ours.now.items():
        assert torch.equal(tensor, theirs.now[name]), name
    # One step of AdamW moves parameters by 0.01, where rounding differs with the number of ranks.
    for name, tensor in ours.later.items():
        torch.testing.assert_close(tensor, theirs.later[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("expert_dim", [0, 1])
def test_checkpoints_load_anywhere(four, two, tmp_path, expert_dim):
    saved, *others = four.run(jobs.save, Run(ep_size=2, expert_dim=expert_dim), tmp_path)
    for other in others:
        assert_same(other, saved)
    for world, run in (
        (four, Run(ep_size=2, expert_dim=expert_dim)),
        (four, Run(ep_size=2, expert_dim=1 - expert_dim)),
        (four, Run(ep_size=4, expert_dim=expert_dim)),
        (four, Run(ep_size=1, dp_replicate=2)),
        (two, Run(ep_size=2)),
    ):
        for loaded in world.run(jobs.load, run, tmp_path):
            assert_same(loaded, saved)
    assert_same(jobs.load_alone(tmp_path), saved)


@pytest.mark.parametrize("expert_dim", [0, 1])
def test_checkpoints_load_into_models_on_meta(four, tmp_path, expert_dim):
    saved, *_ = four.run(jobs.save, Run(ep_size=2), tmp_path)
    for loaded in four.run(jobs.load_from_meta, Run(ep_size=4 - 2 * expert_dim, expert_dim=expert_dim), tmp_path):
        assert_same(loaded, saved)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek-v3", "gpt-oss"])
def test_what_is_exported_reloads(four, tmp_path, kind):
    weights, *_ = four.run(jobs.export, Run(kind=kind), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ in model.config.architectures
    assert model.state_dict().keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_a_model_loads_without_an_optimizer(four, tmp_path):
    saved, *_ = four.run(jobs.save, Run(ep_size=2), tmp_path / "whole")
    for loaded in four.run(jobs.load_without_optimizer, Run(ep_size=4), tmp_path / "whole", tmp_path / "model"):
        for weights in loaded:
            assert weights
            for name, tensor in weights.items():
                assert torch.equal(tensor, saved.now[name]), name


def test_all_ranks_hear_of_an_export_that_fails(four, tmp_path):
    (first, _), *others = errors = four.run(jobs.errors_of_export, tmp_path)
    assert first == "this disk is full"
    for text, _ in others:
        assert text == f"rank 0 could not write {tmp_path}: PermissionError('this disk is full')"
    for _, text in errors:
        assert text == "FSDPQwen3MoeDecoderLayer has no save_pretrained: it is no model of transformers"

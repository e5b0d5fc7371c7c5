"""A checkpoint of four ranks loads into other layouts, bit for bit, and training continues as without it."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_checkpoint_jobs as jobs
import transformers
from fsdp_models import make_model
from fsdp_runs import Run

from fusco.bench.ranks.local_world import LocalWorld, RankFailedError

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def assert_same(ours, theirs):
    assert ours.now.keys() == theirs.now.keys()
    assert any("exp_avg" in name for name in ours.now)
    for name, tensor in ours.now.items():
        assert torch.equal(tensor, theirs.now[name]), name
    # One step of AdamW moves parameters by 0.01, where rounding differs with the number of ranks.
    for name, tensor in ours.later.items():
        torch.testing.assert_close(tensor, theirs.later[name], rtol=0, atol=1e-5)


def test_checkpoints_load_anywhere(four, two, tmp_path):
    saved, *others = four.run(jobs.save, Run(ep_size=2, expert_dim=0), tmp_path)
    for other in others:
        assert_same(other, saved)
    for world, run in ((four, Run(ep_size=4)), (four, Run(ep_size=1, dp_replicate=2)), (two, Run(ep_size=2))):
        for loaded in world.run(jobs.load, run, tmp_path):
            assert_same(loaded, saved)
    assert_same(jobs.load_alone(tmp_path), saved)


def test_checkpoints_load_into_models_on_meta(four, tmp_path):
    saved, *_ = four.run(jobs.save, Run(ep_size=2), tmp_path)
    for loaded in four.run(jobs.load_from_meta, Run(ep_size=4, expert_dim=0), tmp_path):
        assert_same(loaded, saved)
    for loaded in four.run(jobs.load_without_optimizer, Run(ep_size=4), tmp_path, tmp_path / "model"):
        for weights in loaded:
            assert weights
            assert all(torch.equal(tensor, saved.now[name]) for name, tensor in weights.items())


def test_a_save_that_fails_leaves_the_checkpoint_before_it(two, tmp_path):
    """On one rank, for lack of room, then by SIGKILL."""
    outcomes = two.run(jobs.save_on_a_full_disk, tmp_path)
    for error, (before, after) in outcomes:
        assert error.startswith(f"{tmp_path} cannot be written: rank 1 failed with ")
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    num_files = len(list(tmp_path.iterdir()))
    complete, _ = two.run(jobs.loaded, tmp_path)
    with pytest.raises(RankFailedError, match="rank 1: its process died with exit code -9"):
        two.run(jobs.be_killed_in_save, tmp_path, 1)
    assert len(list(tmp_path.iterdir())) > num_files
    for again in two.run(jobs.loaded, tmp_path):
        assert all(torch.equal(tensor, complete[name]) for name, tensor in again.items())


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_what_is_exported_reloads(four, tmp_path, kind):
    """By transformers, and with another ep_size."""
    weights, *_ = four.run(jobs.export, Run(kind=kind), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ in model.config.architectures
    for read in (
        model.state_dict(),
        *(each for each, _ in four.run(jobs.load_export, Run(kind=kind, ep_size=4), tmp_path)),
    ):
        assert read.keys() == weights.keys()
        for name, tensor in read.items():
            assert torch.equal(tensor, weights[name]), name


def test_files_of_an_export_have_a_size(four, tmp_path):
    model = make_model("mixtral")
    for limit in (1, 25000, 1 << 20):
        path = tmp_path / str(limit)
        four.run(jobs.export_files, Run(kind="mixtral"), path, limit)
        files = sorted(path.glob("*.safetensors"))
        assert len(files) == {1: 7, 25000: 3, 1 << 20: 1}[limit]
        assert sum(file.stat().st_size for file in files) > sum(each.nbytes for each in model.state_dict().values())
        assert limit == 1 or all(file.stat().st_size <= limit for file in files)
        index = {"model.safetensors.index.json"} if len(files) > 1 else set()
        assert {file.name for file in path.iterdir()} == index | {each.name for each in files} | {
            "config.json",
            "generation_config.json",
        }
        again = transformers.AutoModelForCausalLM.from_pretrained(path)
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_an_export_takes_half_a_share_and_a_layer_of_memory(tmp_path):
    """Rank 0 took ten layers; in processes of their own, since others have room left from what ran before."""
    with LocalWorld(4) as world:
        for share, layer, used in world.run(jobs.memory_of_export, 4, tmp_path):
            assert used < share / 2 + layer


def test_a_failed_export_raises_on_all_ranks(four, tmp_path):
    (first, _), *others = errors = four.run(jobs.errors_of_export, tmp_path)
    assert first == "this disk is full"
    for text, _ in others:
        assert text == f"rank 0 could not write {tmp_path}: PermissionError('this disk is full')"
    for _, text in errors:
        assert text == "FSDPQwen3MoeDecoderLayer has no save_pretrained: it is not a model of transformers"


@pytest.mark.parametrize(
    "run",
    [
        Run(kind="qwen3", ep_size=4),
        Run(kind="mixtral", ep_size=2, expert_dim=0),
        Run(kind="deepseek-v3", ep_size=2),
        Run(kind="gpt-oss", ep_size=1, dp_replicate=2),
    ],
    ids=lambda run: run.kind,
)
def test_weights_of_transformers_are_read_part_by_part(four, tmp_path, run):
    """Written in several files; names and layouts of experts in files differ between architectures."""
    model = make_model(run.kind)
    expected = model.state_dict()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    experts = max(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    for weights, most_read in four.run(jobs.load_export, run, tmp_path):
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), name
        assert most_read <= experts // run.ep_size


def test_ranks_without_a_part_read_nothing(four, tmp_path):
    """Two experts among four ranks."""
    changes = {"num_experts": 2, "num_experts_per_tok": 1}
    model = make_model("qwen3", **changes)
    model.save_pretrained(tmp_path)
    for weights, _ in four.run(jobs.load_export, Run(ep_size=1, expert_dim=0), tmp_path, **changes):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[name]), name


def test_files_without_the_weights_of_the_model(four, tmp_path):
    make_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path / "missing")
    make_model("qwen3", moe_intermediate_size=16).save_pretrained(tmp_path / "shape")
    make_model("qwen3").save_pretrained(tmp_path / "quantized")
    config = tmp_path / "quantized" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "nothing").mkdir()
    for errors in four.run(jobs.errors_of_import, "qwen3", tmp_path):
        assert "weights of the model are not in" in errors["missing"]
        assert "such as model.layers.1.input_layernorm.weight" in errors["missing"]
        assert errors["shape"] == (
            "model.layers.0.mlp.experts.down_proj has shape (8, 16, 8) in the model and (8, 16, 16) in the files"
        )
        assert "has quantized weights" in errors["quantized"]
        assert "has neither model.safetensors nor model.safetensors.index.json" in errors["nothing"]

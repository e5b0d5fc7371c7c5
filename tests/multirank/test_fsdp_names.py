"""Weights have the names in files that transformers gives them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_names_jobs as jobs
import torch
import transformers
from fsdp_models import make_model
from safetensors.torch import load_file

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


# Whose files transformers makes differently: experts merged, transposed, split or as they are, layers in groups, with a
# prefix, rows that are padding, other kinds of heads, classes that are rejected or cannot be made.
KINDS = ("aria", "deepseek_v4", "diffusion_gemma", "gpt_oss", "inkling", "inkling2", "kimi_k25", "lara_mini", "llama4")
KINDS += ("longcat_flash", "mixtral", "muse_spark", "nemotron_h", "qwen3_5_moe", "qwen3_moe", "qwen3_vl_moe")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_the_plain_model(one, tmp_path, kind):
    """Every class of models: names and values are written, reloaded by transformers, and read by us alike.

    ``make test-architectures`` has all kinds.
    """
    assert one.run(jobs.wrong_files, kind, tmp_path) == [[]]


def test_misnamed_weights_are_noticed(one, tmp_path):
    (error,) = one.run(jobs.errors_of_names, tmp_path)
    assert error == (
        f"transformers would not find 1 weights of the model in its files, such as model.embed_tokens.weight: "
        f"{tmp_path} is left as it was"
    )
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_written_once(two, tmp_path):
    two.run(jobs.export_tied, tmp_path)
    model = make_model("qwen3", tie_word_embeddings=True)
    files = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in files
    assert "lm_head.weight" not in files
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_models_that_transformers_has_distributed_are_written_by_it(two, tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs accelerate to distribute a model")
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    for error in two.run(jobs.export_through_transformers, tmp_path / "plain", tmp_path / "again"):
        assert error.startswith("transformers has distributed this Qwen3MoeForCausalLM by its distributed_config")
    plain, again = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "again"))
    assert plain.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in plain.items())

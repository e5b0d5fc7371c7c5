"""Weights have the names in files that transformers gives them, for all architectures."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_names_jobs as jobs
import torch
import transformers
from fsdp_architectures import REJECTED, UNMADE, find_kinds
from fsdp_models import make_model
from safetensors.torch import load_file

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def test_architectures_are_found():
    """Those that other tests train are among them."""
    assert {"qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"} <= set(find_kinds())


@pytest.mark.parametrize("kind", find_kinds())
def test_files_are_those_of_the_plain_model(one, tmp_path, kind):
    """Every class of models: names and values are written, reloaded by transformers, and read by us alike."""
    (trips,) = one.run(jobs.round_trips, kind, tmp_path)
    assert {name: faults for name, faults in trips.faults.items() if faults} == {}
    for name, why in trips.unmade.items():
        assert UNMADE.get(name, "nothing, so give it sizes in fsdp_architectures.py") in why, name
    for name, why in trips.rejected.items():
        reasons = [text for prefix, text in REJECTED.items() if name.startswith(prefix)]
        assert re.search("|".join([*reasons, "has no module of experts: one with the parameters"]), why), name
    assert trips.faults or any(name.startswith(tuple(REJECTED)) for name in trips.rejected)


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

"""Training continues from checkpoints with state for some parameters only; checkpoints of other models are rejected."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_resume_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def test_parameters_without_gradients_have_no_state(two, tmp_path):
    for saved, *others in two.run(jobs.resume, tmp_path):
        assert any(name.endswith(".exp_avg") for name in saved.loaded)
        assert not any(jobs.INDEXER in name and name.endswith(".exp_avg") for name in saved.loaded)
        for loaded in others:
            assert loaded.loaded.keys() == saved.loaded.keys()
            assert loaded.stepped.keys() == saved.stepped.keys()
            assert all(torch.equal(tensor, saved.loaded[name]) for name, tensor in loaded.loaded.items())
            assert all(torch.equal(tensor, saved.stepped[name]) for name, tensor in loaded.stepped.items())
    alone = jobs.resume_alone(tmp_path)
    assert alone.keys() == saved.loaded.keys()
    assert all(torch.equal(tensor, saved.loaded[name]) for name, tensor in alone.items())


def test_checkpoints_of_other_models_are_rejected(two, tmp_path):
    first, second = two.run(jobs.errors, tmp_path)
    nothing = f"{tmp_path}/nothing has no .metadata: no save_checkpoint into it was completed"
    assert first.pop("of nothing on rank 1") == f"rank 1 failed with ValueError: {nothing}"
    assert second.pop("of nothing on rank 1") == nothing
    assert first.pop("without memory on rank 1") == "rank 1 failed with ValueError: no memory for moments"
    assert second.pop("without memory on rank 1") == "no memory for moments"
    for rank, errors in enumerate((first, second)):
        assert errors.pop("broken") == f"{tmp_path}/{rank}/.metadata cannot be read: EOFError('Ran out of input')"
    assert first == second
    assert first.pop("nowhere").startswith(
        f"{tmp_path}/file/below cannot be written: rank 0 failed with NotADirectoryError: "
    )
    assert first.pop("of other sizes").startswith(
        f"{tmp_path}/whole cannot be read: rank 0 failed with ValueError: Size mismatch between saved"
    )
    assert first == {
        "without an optimizer": f"{tmp_path}/model has no optimizer: load it without one",
        "of another optimizer": "the checkpoint's optimizer has no dampening for parameter model.embed_tokens.weight: "
        "it was of another kind, or had other parameters",
        "of another model": f"11 weights of the model are not in {tmp_path}/whole, such as "
        "model.layers.2.input_layernorm.weight",
        "of a larger model": f"11 weights in {tmp_path}/whole are not in the model, such as "
        "model.layers.1.input_layernorm.weight",
        "of nothing": nothing,
    }

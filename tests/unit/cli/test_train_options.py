"""Options of ``fusco train``: presets that go together, and names that are those of the library."""

from contextlib import nullcontext
from typing import get_args

import pytest
from typer.testing import CliRunner

from fusco.cli.main import app
from fusco.cli.train import _PRESETS, Checkpointing, Device, PresetName, TrainDtype
from fusco.fsdp import checkpointing
from fusco.train import text, world
from fusco.train.job import ModelShape, TrainingJob


def test_option_names_are_those_of_the_library():
    assert tuple(name.value for name in Checkpointing) == get_args(checkpointing.Checkpointing)
    hints = TrainingJob.__annotations__
    assert {name.value for name in TrainDtype} == {"float32", "bfloat16"}
    assert all(repr(name.value).strip("'") in hints["dtype"] for name in TrainDtype)
    assert all(name.value in hints["device"] for name in Device)


@pytest.mark.parametrize("name", list(PresetName))
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_presets_go_together_on_four_ranks(name, ep_size):
    sizes = _PRESETS[name].changed(lr=None)
    assert sizes == _PRESETS[name]
    shape = ModelShape(
        num_layers=sizes.layers,
        hidden=sizes.hidden,
        num_experts=sizes.num_experts,
        num_topk=sizes.num_topk,
        moe_intermediate=sizes.moe_intermediate,
    )
    job = TrainingJob(
        shape=shape,
        num_ranks=4,
        ep_size=ep_size,
        tokens=sizes.tokens,
        length=sizes.length,
        learning_rate=sizes.lr,
        dtype=sizes.dtype,
    )
    assert job.num_sequences * job.length == job.tokens


def test_a_rank_of_torchrun_leaves_reading_the_text_to_its_training(monkeypatch):
    pytest.importorskip("transformers", reason="fusco train needs it")
    monkeypatch.setattr(world, "joined_by_torchrun", lambda device: nullcontext(world.Joined(rank=1, num_ranks=2)))
    monkeypatch.setattr(world, "run_joined", lambda job, report, **_: [])
    monkeypatch.setattr(text, "load_text", lambda job: pytest.fail("read twice"))
    done = CliRunner().invoke(app, ["train"])
    assert done.exit_code == 0, done.exception


def test_the_large_preset_is_what_it_is_said_to_be():
    large = _PRESETS[PresetName.LARGE]
    assert (large.num_experts, large.num_topk, large.hidden, large.layers) == (64, 8, 2048, 8)
    assert (large.tokens, large.dtype) == (8192, "bfloat16")
    assert large.changed(layers=2, lr=0.5, tokens=None).layers == 2

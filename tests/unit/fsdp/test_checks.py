"""Parameters that FSDP cannot shard, or that several FSDP units would share."""

import pytest
import torch
from torch import nn

from fusco.fsdp.checks import check_parameters


def make_blocks():
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model["head"] = nn.Linear(2, 2)
    return model


def test_within_the_root_parameters_may_be_one():
    model = make_blocks()
    model["head"].weight = model["embed"].weight
    check_parameters(model, model["blocks"])


def test_within_a_block_parameters_may_be_one():
    model = make_blocks()
    model["blocks"][0].other = nn.Linear(2, 2)
    model["blocks"][0].other.weight = model["blocks"][0].weight
    check_parameters(model, model["blocks"])


def test_a_block_that_is_there_twice_is_one_unit():
    model = make_blocks()
    model["blocks"][1] = model["blocks"][0]
    check_parameters(model, model["blocks"])


@pytest.mark.parametrize("name", ["embed", "blocks.0"])
def test_blocks_share_nothing_with_others(name):
    model = make_blocks()
    model["blocks"][1].weight = model.get_submodule(name).weight
    with pytest.raises(ValueError, match=rf"^{name}\.weight and blocks\.1\.weight are one parameter, but FSDP shards"):
        check_parameters(model, model["blocks"])


def test_what_a_block_trains_is_of_one_dtype():
    model = make_blocks()
    model["blocks"][0].bfloat16()  # blocks may differ
    model["blocks"][1].bias.requires_grad_(False)
    model["blocks"][1].bias.data = model["blocks"][1].bias.data.double()
    check_parameters(model, model["blocks"])
    model["blocks"][1].bias.requires_grad_()
    text = r"^blocks\.1\.weight is torch\.float32 and blocks\.1\.bias is torch\.float64, but FSDP needs one .* Linear"
    with pytest.raises(ValueError, match=text):
        check_parameters(model, model["blocks"])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (torch.ones(()), r"^head\.weight has no dimension for FSDP to shard: give it the shape \(1,\)$"),
        (torch.ones(2, 3).t(), r"^head\.weight of shape \(3, 2\) has strides \(1, 3\), but FSDP shards contiguous"),
    ],
)
def test_parameters_that_cannot_be_cut_are_named(values, text):
    model = make_blocks()
    model["head"].weight = nn.Parameter(values)
    with pytest.raises(ValueError, match=text):
        check_parameters(model, model["blocks"])

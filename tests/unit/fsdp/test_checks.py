"""Parameters that several FSDP units would share."""

import pytest
from torch import nn

from fusco.fsdp.checks import check_ties


def make_blocks():
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model["head"] = nn.Linear(2, 2)
    return model


def test_within_the_root_parameters_may_be_one():
    model = make_blocks()
    model["head"].weight = model["embed"].weight
    check_ties(model, model["blocks"])


def test_within_a_block_parameters_may_be_one():
    model = make_blocks()
    model["blocks"][0].other = nn.Linear(2, 2)
    model["blocks"][0].other.weight = model["blocks"][0].weight
    check_ties(model, model["blocks"])


def test_a_block_that_is_there_twice_is_one_unit():
    model = make_blocks()
    model["blocks"][1] = model["blocks"][0]
    check_ties(model, model["blocks"])


@pytest.mark.parametrize("name", ["embed", "blocks.0"])
def test_blocks_share_nothing_with_others(name):
    model = make_blocks()
    model["blocks"][1].weight = model.get_submodule(name).weight
    with pytest.raises(ValueError, match=rf"^{name}\.weight and blocks\.1\.weight are one parameter, but FSDP shards"):
        check_ties(model, model["blocks"])

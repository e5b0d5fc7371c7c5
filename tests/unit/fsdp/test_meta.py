"""Parameters without memory, buffers with values."""

import pytest
import torch
from torch import nn

from fusco.fsdp import materialize, parameters_on_meta


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scale", torch.arange(2.0), persistent=False)
        self.register_parameter("nothing", None)


def test_parameters_have_no_memory_and_buffers_have_values():
    with parameters_on_meta():
        module = Scaled()
    assert module.linear.weight.is_meta
    assert not module.frozen.requires_grad
    materialize(module, "cpu")
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert module.scale.tolist() == [0, 1]
    assert not Scaled().linear.weight.is_meta


def test_buffers_without_values_are_named():
    with torch.device("meta"):
        module = Scaled()
    with pytest.raises(ValueError, match="buffer scale has no values"):
        materialize(module, "cpu")

"""LoRA of peft on experts: this rank's part, as two small products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fusco.fsdp.expert_adapters import ExpertAdapter
from fusco.fsdp.experts import find_experts

peft = pytest.importorskip("peft", reason="tests of adapters need peft: pip install peft")

NUM_EXPERTS, HIDDEN, INNER = 4, 32, 24
COUNTS = torch.tensor([2, 0, 3, 1])


class Stack(nn.Module):
    """Experts without a gate, with matrices in one order or the other."""

    def __init__(self, is_transposed):
        super().__init__()
        self.is_transposed, self.act_fn = is_transposed, nn.Tanh()
        up, down = (HIDDEN, INNER), (INNER, HIDDEN)
        torch.manual_seed(0)
        for name, shape in (("up_proj", up), ("down_proj", down)):
            values = torch.randn(NUM_EXPERTS, *(shape if is_transposed else shape[::-1]))
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Return the sum of each row's experts."""
        out = torch.zeros_like(hidden_states)
        for expert in range(NUM_EXPERTS):
            up, down = self.up_proj[expert], self.down_proj[expert]
            if not self.is_transposed:
                up, down = up.T, down.T
            weight = (top_k_weights * (top_k_index == expert)).sum(1, keepdim=True)
            out = out + weight * (self.act_fn(hidden_states @ up) @ down)
        return out


def make(is_transposed, rank=3):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=rank, target_modules=[], target_parameters=["up_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(nn.ModuleDict({"experts": Stack(is_transposed)}), config)


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize(("first", "num_local"), [(0, 4), (1, 2)])
def test_each_expert_gets_what_peft_adds_to_it(is_transposed, first, num_local):
    model = make(is_transposed)
    (experts,) = find_experts(model)
    for found in experts.adapters:
        adapter = ExpertAdapter(found.layer, experts.module, first, num_local)
        adapter._is_called = True
        a, b = adapter.weights(torch.float64).values()
        delta = found.layer.get_delta_weight("default").double()[first : first + num_local]
        if not is_transposed:
            delta = delta.transpose(1, 2)
        torch.testing.assert_close(found.layer.scaling["default"] * a @ b, delta, rtol=0, atol=1e-5)
        assert a.shape[2] == b.shape[1] == 4  # zeros up to 16 bytes
        assert not a[..., 3].any()


def test_only_calls_through_the_wrapper_have_adapters():
    model = make(is_transposed=True)
    (experts,) = find_experts(model)
    outer, inner = experts.adapters
    assert {outer.parameter, inner.parameter} == {"up_proj", "down_proj"}
    assert outer.weights(torch.float32) == {}
    with pytest.raises(ValueError, match="cannot differ within a batch"):
        outer(torch.zeros(1, HIDDEN), adapter_names=["default"])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns, views of known ones aside."""

    def __init__(self, known):
        super().__init__()
        self.size, self.known = 0, {each.untyped_storage().data_ptr() for each in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_flatten(out)[0] if isinstance(each, torch.Tensor)]
        made = [each.numel() for each in tensors if each.untyped_storage().data_ptr() not in self.known]
        self.size = max([self.size, *made])
        return out


def test_no_tensor_is_as_large_as_the_difference_of_a_projection():
    model = make(is_transposed=True)
    (experts,) = find_experts(model)
    experts.module.requires_grad_(False)
    rows = torch.randn(int(COUNTS.sum()), HIDDEN, requires_grad=True)
    for adapter in experts.adapters:
        adapter._is_called = True
    stacks = list(experts.module.parameters())
    trained = [each for each in model.parameters() if each.requires_grad]
    with Largest(stacks) as largest:
        experts.run(rows, COUNTS).square().sum().backward()
    assert all(each.grad is not None for each in (rows, *trained))
    assert 0 < largest.size < min(each.numel() for each in stacks)


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("safe_merge", [True, False])
def test_merged_and_unmerged_as_peft_does(is_transposed, safe_merge):
    expected, model = make(is_transposed), make(is_transposed)
    (experts,), before = find_experts(model), {k: v.clone() for k, v in model.state_dict().items()}
    for adapter in experts.adapters:
        adapter.merge(safe_merge=safe_merge)
    for layer in (each for each in expected.modules() if hasattr(each, "base_layer")):
        layer.merge()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-5)
    for adapter in experts.adapters:
        assert adapter.layer.merged
        adapter.unmerge()
    for name, tensor in before.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-5)


def test_weights_of_another_layout_are_rejected():
    model = make(is_transposed=True)
    layer = next(each for each in model.modules() if getattr(each, "parameter_name", "") == "down_proj")
    layer.lora_A["default"] = nn.Linear(INNER + 1, 3 * NUM_EXPERTS, bias=False)
    with pytest.raises(ValueError, match=r"down_proj \(4, 24, 32\) has weights \(12, 25\) and \(32, 12\), and"):
        find_experts(model)

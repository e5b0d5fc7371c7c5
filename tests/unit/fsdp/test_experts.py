"""Experts are found by their structure."""

import pytest
import torch
from torch import nn

from fusco.fsdp import find_experts


class Stack(nn.Module):
    """Parameters of the given shapes, and SiLU."""

    def __init__(self, **shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.act_fn = nn.SiLU()


def only(module):
    (experts,) = find_experts(nn.ModuleDict({"mlp": nn.ModuleDict({"whatever": module}), "conv": nn.Conv1d(4, 4, 3)}))
    return experts


ROWS, COUNTS = torch.linspace(-1, 1, 15).view(5, 3), torch.tensor([2, 3])


def by_hand(function):
    return torch.cat([function(rows, e) for e, rows in enumerate(ROWS.split(COUNTS.tolist()))])


def test_gated_experts():
    experts = only(Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4)))
    assert (experts.name, experts.num_experts, experts.is_transposed) == ("mlp.whatever", 2, False)

    def run(rows, e):
        gate, up = (rows @ experts.module.gate_up_proj[e].T).chunk(2, dim=-1)
        return (nn.functional.silu(gate) * up) @ experts.module.down_proj[e].T

    torch.testing.assert_close(experts.run(ROWS, COUNTS), by_hand(run))


def test_experts_with_biases_another_gate_and_transposed_matrices():
    module = Stack(gate_up_proj=(2, 3, 8), down_proj=(2, 4, 3), gate_up_proj_bias=(2, 8), down_proj_bias=(2, 3))
    module._apply_gate = lambda hidden: hidden[:, ::2] * hidden[:, 1::2].tanh()
    experts = only(module)
    assert experts.is_transposed

    def run(rows, e):
        hidden = module._apply_gate(rows @ module.gate_up_proj[e] + module.gate_up_proj_bias[e])
        return hidden @ module.down_proj[e] + module.down_proj_bias[e]

    torch.testing.assert_close(experts.run(ROWS, COUNTS), by_hand(run))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_without_a_gate(is_transposed):
    """Their shapes fit either way, so the module must say."""
    module = Stack(up_proj=(2, 3, 3), down_proj=(2, 3, 3))
    module.is_transposed = is_transposed
    experts = only(module)
    turn = (lambda matrix: matrix) if is_transposed else (lambda matrix: matrix.T)

    def run(rows, e):
        return nn.functional.silu(rows @ turn(module.up_proj[e])) @ turn(module.down_proj[e])

    torch.testing.assert_close(experts.run(ROWS, COUNTS), by_hand(run))


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            {"w1": (2, 8, 3), "w2": (2, 3, 4)},
            r"ModuleDict has no module of experts: .* experts: mlp\.whatever \(Stack\) has w1 \(2, 8, 3\), w2 "
            r"\(2, 3, 4\): the parameters of three dimensions are w1, w2$",
        ),
        ({"gate_up_proj": (2, 8, 3), "down_proj": (2, 5, 7)}, r"\(2, 8, 3\) and \(2, 5, 7\), do not match"),
        (
            {"gate_up_proj": (2, 8, 3), "down_proj": (2, 3, 4), "scale": (3,)},
            r"mlp\.whatever\.scale of shape \(3,\) cannot be distributed with the 2 experts",
        ),
        ({"gate_up_proj": (2, 8, 3)}, r"ModuleDict has no .*: the parameters of three dimensions are gate_up_proj$"),
        (
            {"gate_up_proj": (2, 8, 3), "down_proj": (3, 3, 4)},
            r"ModuleDict has no .*: gate_up_proj is of 2 experts and down_proj of 3$",
        ),
    ],
)
def test_obstacles_are_named(shapes, text):
    with pytest.raises(ValueError, match=text):
        only(Stack(**shapes))


class Embeddings(nn.Module):
    """As those of InternVL: two 3-D parameters with an equal dimension 0."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 5, 4))


class SharedExperts(Stack):
    """As those of Inkling: three projections, every token to all."""

    def __init__(self):
        super().__init__(gate_proj=(2, 4, 3), up_proj=(2, 4, 3), down_proj=(2, 3, 4))

    def forward(self, hidden_states, gammas):
        """Not called."""


class SortedExperts(Stack):
    """As those of Llama 4, which get rows that are sorted already."""

    def __init__(self):
        super().__init__(gate_up_proj=(2, 3, 8), down_proj=(2, 4, 3))

    def forward(self, hidden_states):
        """Not called."""


@pytest.mark.parametrize("other", [Embeddings(), SharedExperts(), SortedExperts()])
def test_modules_that_only_look_like_experts_are_skipped(other):
    experts = Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4))
    (found,) = find_experts(nn.ModuleDict({"before": other, "experts": experts, "after": other}))
    assert found.module is experts


def test_experts_that_get_no_routing_are_named_if_there_are_no_others():
    text = r"mlp \(SortedExperts\) .*: it is called with \(hidden_states\) and not with \(hidden_states, top_k_index, "
    with pytest.raises(ValueError, match=text):
        find_experts(nn.ModuleDict({"mlp": SortedExperts()}))


class FlatExperts(Stack):
    """As those of DBRX."""

    def __init__(self):
        super().__init__(w1=(8, 3), v1=(8, 3), w2=(8, 3))


def test_all_that_looks_like_experts_is_named_with_the_reason_each_kind_once():
    layers = [
        nn.ModuleDict(
            {
                "norm": nn.LayerNorm(3),
                "conv": nn.Conv1d(4, 4, 3),
                "experts": nn.ModuleList([nn.Linear(3, 3) for _ in range(4)]),
                "flat": nn.ModuleDict({"mlp": FlatExperts()}),
                "unequal": Stack(gate_up_proj=(2, 8, 3), down_proj=(3, 3, 4)),
            }
        )
        for _ in range(3)
    ]
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        find_experts(nn.ModuleList(layers))
    start, _, seen = str(error.value).partition(". What looks like experts: ")
    assert start.startswith("ModuleList has no module of experts: one with the parameters gate_up_proj")
    no_stacks = "no parameter has three dimensions, the first of them the expert"
    assert seen.split("; ") == [
        "0.experts and 2 more (ModuleList of 4 Linear) has no direct parameters: each expert is a module by itself",
        f"0.flat.mlp and 2 more (FlatExperts) has w1 (8, 3), v1 (8, 3), w2 (8, 3): {no_stacks}",
        "0.unequal and 2 more (Stack) has gate_up_proj (2, 8, 3), down_proj (3, 3, 4): gate_up_proj is of 2 experts "
        "and down_proj of 3",
    ]


def test_a_model_with_nothing_like_experts():
    with pytest.raises(ValueError, match=r"as the MoE models of transformers 5 have$"):
        find_experts(nn.Sequential(nn.Linear(3, 3), nn.Conv1d(4, 4, 3), nn.LayerNorm(3)))


def test_a_long_list_of_what_looks_like_experts_ends():
    modules = [Stack(**{f"w{index}": (2, 3, 4)}) for index in range(8)]
    with pytest.raises(ValueError, match=r"; 5 \(Stack\) has w5 [^;]*; and 2 kinds more$"):
        find_experts(nn.ModuleList(modules))


class ParamWrapper(nn.Module):
    """As that of peft, which changes a parameter of its ``base_layer``."""

    def __init__(self, base_layer, parameter_name):
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 4)})

    def forward(self, *args):
        """Not called."""


def test_experts_with_an_adapter_are_rejected():
    plain, experts = (Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4)) for _ in range(2))
    wrapped = ParamWrapper(ParamWrapper(experts, "gate_up_proj"), "down_proj")
    text = (
        r"mlp\.experts\.base_layer\.base_layer \(Stack\) is wrapped by an adapter, ParamWrapper: of adapters on "
        r"experts, .* target_parameters\), so leave experts out .*, or merge it first"
    )
    with pytest.raises(ValueError, match=text):
        find_experts(nn.ModuleDict({"first": plain, "mlp": nn.ModuleDict({"experts": wrapped})}))


def test_adapters_elsewhere_are_ignored():
    experts = Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4))
    model = nn.ModuleDict({"q_proj": ParamWrapper(nn.Linear(3, 3), "weight"), "experts": experts})
    assert [found.name for found in find_experts(model)] == ["experts"]


def test_adapters_within_experts_are_rejected():
    experts = Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4))
    experts.lora_A = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"^0\.lora_A\.weight of shape \(4, 3\) cannot be distributed"):
        find_experts(nn.ModuleList([experts]))


def test_parametrized_experts_are_rejected_and_not_left_out():
    plain, experts = (Stack(gate_up_proj=(2, 8, 3), down_proj=(2, 3, 4)) for _ in range(2))
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", nn.Tanh(), unsafe=True)
    with pytest.raises(ValueError, match=r"^1 \(ParametrizedStack\) has parametrizations of gate_up_proj"):
        find_experts(nn.ModuleList([plain, experts]))


def test_the_host_reads_the_sizes_of_blocks_once_a_layer(monkeypatch):
    """No row is a multiple of 16 bytes, so both projections are loops."""
    asked, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tensor) or tolist(tensor))
    only(Stack(gate_up_proj=(2, 10, 3), down_proj=(2, 3, 5))).run(ROWS, COUNTS)
    assert len(asked) == 1

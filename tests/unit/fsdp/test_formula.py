"""Modules of experts that do not compute what would replace them are rejected."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusco.fsdp import find_experts, parameters_on_meta
from fusco.fsdp.formula import FormulaChecks, check_formulas


class Experts(nn.Module):
    """Experts as in transformers; ``gate`` is the part between the projections."""

    def __init__(self, num_experts=6, hidden=12, intermediate=8):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2 * intermediate, hidden, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden, intermediate, dtype=torch.bfloat16))
        self.act_fn = nn.SiLU()

    def gate(self, gate, up):
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(len(self.gate_up_proj)):
            token, k = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            result = self.gate(gate, up) @ self.down_proj[expert].T
            out.index_add_(0, token, result * top_k_weights[token, k, None])
        return out


class Clamped(Experts):
    def gate(self, gate, up):
        return super().gate(gate.clamp(max=10), up.clamp(-10, 10))


class WithOne(Experts):
    """As GPT-OSS, whose values are small at first."""

    def gate(self, gate, up):
        return super().gate(gate, up + 1)


class Dropping(Experts):
    def gate(self, gate, up):
        return nn.functional.dropout(super().gate(gate, up), 0.1, self.training)


class WeightedFirst(Experts):
    """As Llama 4, which multiplies what goes into its experts."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        weighted = hidden_states * top_k_weights.sum(1, keepdim=True)
        return super().forward(weighted, top_k_index, torch.ones_like(top_k_weights))


class Turned(Experts):
    """Its matrices are square, so only its forward determines their orientation."""

    def __init__(self):
        super().__init__(hidden=8, intermediate=4)
        self.down_proj = nn.Parameter(torch.zeros(6, 8, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        kept = self.gate_up_proj
        self.gate_up_proj = nn.Parameter(kept.transpose(1, 2))
        try:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        finally:
            self.gate_up_proj = kept


class Neighbours(Experts):
    """Its expert 0 has the matrices of expert 1."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index.clamp(min=1), top_k_weights)


class DenseWeights(Experts):
    """Its weights are (num_tokens, num_experts)."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.gather(1, top_k_index))


class Tuple(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights), None


def check(*modules):
    check_formulas(find_experts(nn.ModuleDict({str(index): module for index, module in enumerate(modules)})))


def test_what_fusco_computes_is_accepted_and_left_as_it_was():
    module = Experts().eval()
    parameters, generator = dict(module.named_parameters()), torch.get_rng_state()
    check(module, Experts(num_experts=1), Experts(hidden=5, intermediate=3))
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == {
        name: id(parameter) for name, parameter in parameters.items()
    }
    assert all(parameter.dtype == torch.bfloat16 and parameter.requires_grad for parameter in parameters.values())
    assert not any(each.training for each in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("wrong", [Clamped, WithOne, Dropping, WeightedFirst, Turned, Neighbours])
@pytest.mark.parametrize("is_on_meta", [False, True])
def test_what_computes_something_else_is_rejected(wrong, is_on_meta):
    """All weights are zero, so only random ones reveal it."""
    if is_on_meta:
        with parameters_on_meta():
            module = wrong()
    else:
        module = wrong()
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^1 \({wrong.__name__}\) computes something else than fusco.* differ by"):
        check(Experts(), module)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.is_meta == is_on_meta for parameter in module.parameters())


def test_the_text_says_what_fusco_would_compute_and_how_far_it_is_from_that():
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        check(Clamped())
    text, _, rest = str(error.value).partition("differ by ")
    assert text == (
        "0 (Clamped) computes something else than fusco, which would replace it by down_proj(act_fn(gate) * up), gate "
        "and up being the halves of gate_up_proj(row): on random rows the outputs "
    )
    assert float(rest.split()[0]) > 1
    assert rest.endswith(" times a row's largest value (allowed: 0.001)")


@pytest.mark.parametrize(("precision", "allowed"), [("ieee", "0.001"), ("bf16", "0.05")])
def test_products_of_less_precision_may_differ_more(precision, allowed):
    """PyTorch raises if asked for the precision of all backends after it was set for one."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = precision
    try:
        with pytest.raises(ValueError, match=rf"allowed: {allowed}\)$"):
            check(Clamped())
        check(Experts())
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_what_cannot_be_run_with_routing_is_rejected():
    with pytest.raises(ValueError, match=r"^0 \(DenseWeights\) cannot be compared with .* it raised RuntimeError"):
        check(DenseWeights())
    with pytest.raises(ValueError, match=r"^0 \(Tuple\) returns tuple for rows of shape \(4, 12\)"):
        check(Tuple())


def test_layers_that_are_alike_are_compared_once_and_others_each():
    asked = []

    class Counting(Experts):
        def __init__(self, limit):
            super().__init__()
            self.limit = limit

        def gate(self, gate, up):
            asked.append(self.limit)
            return super().gate(gate.clamp(max=self.limit), up)

    check(Counting(1e6), Counting(1e6), Counting(1e7))
    assert sorted(set(asked)) == [1e6, 1e7]
    assert asked.count(1e6) == asked.count(1e7)
    with pytest.raises(ValueError, match=r"^1 \(Counting\)"):
        check(Counting(1e6), Counting(7.0), Counting(5.0))


def test_an_instance_forward_makes_a_layer_different():
    one, other = Experts(), Experts()
    other.forward = lambda hidden_states, top_k_index, top_k_weights: hidden_states
    with pytest.raises(ValueError, match=r"^1 \(Experts\)"):
        check(one, other)


def test_buffers_without_values_are_warned_of():
    module = Clamped()
    module.register_buffer("limit", torch.zeros(1, device="meta"))
    with pytest.warns(UserWarning, match=r"0\.limit is on the meta device, so fusco cannot check whether Clamped"):
        check(module)


def test_experts_without_a_gate_and_with_biases():
    class Plain(nn.Module):
        is_transposed = True

        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = (nn.Parameter(torch.zeros(4, 8, 8)) for _ in range(2))
            self.up_proj_bias, self.down_proj_bias = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))
            self.act_fn = nn.ReLU()
            self.has_bias_last = False

        def forward(self, hidden_states, top_k_index, top_k_weights):
            def expert(x, e):
                hidden = self.act_fn(x @ self.up_proj[e] + self.up_proj_bias[e])
                return hidden @ self.down_proj[e] + self.down_proj_bias[e]

            return torch.stack(
                [
                    sum(weight * expert(x, e) for e, weight in zip(chosen, weights, strict=True))
                    + (self.down_proj_bias[0] if self.has_bias_last else 0)
                    for x, chosen, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True)
                ]
            )

    check(Plain())
    wrong = Plain()
    wrong.has_bias_last = True
    with pytest.raises(ValueError, match=r"replace it by down_proj\(act_fn\(up_proj\(row\)\)\)"):
        check(wrong)


def check_one(module, checks=None):
    (experts,) = find_experts(module)
    (checks or FormulaChecks()).check(experts)


def test_single_modules_are_checked_by_the_forward_of_their_class():
    def forward_that_calls_fusco(hidden_states, top_k_index, top_k_weights):
        raise AssertionError("a check must not call the forward that asked for it")

    accepted, rejected = Experts(), Clamped()
    accepted.forward = rejected.forward = forward_that_calls_fusco
    check_one(accepted)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Clamped computes something else than fusco"):
            check_one(rejected)


def test_single_modules_that_are_alike_are_checked_once():
    asked = []

    class Counting(Experts):
        def gate(self, gate, up):
            asked.append(len(gate))
            return super().gate(gate, up)

    checks, first, second = FormulaChecks(), Counting(), Counting()
    second.act_fn = first.act_fn
    check_one(first, checks)
    assert asked
    asked.clear()
    check_one(second, checks)
    assert not asked
    del first, second
    gc.collect()
    check_one(Counting(), checks)
    assert asked


def test_a_rank_may_have_fewer_experts_than_a_token():
    class FixedTopK(Experts):
        top_k = 3

        def forward(self, hidden_states, top_k_index, top_k_weights):
            top_k_index = top_k_index.flatten().reshape(len(hidden_states), self.top_k)
            return super().forward(hidden_states, top_k_index, top_k_weights)

    check_one(FixedTopK(num_experts=1))


def test_dispatch_modes_do_not_see_a_check():
    class Looking(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    (experts,) = find_experts(Experts())
    with Looking() as looking:
        FormulaChecks().check(experts)
        assert looking.calls == 0
        torch.ones(1)
        assert looking.calls == 1


class ScaledExperts(Experts):
    """As those of Llama 4: called with every token for each expert, scaled."""

    def forward(self, hidden_states):
        rows = hidden_states.view(len(self.gate_up_proj), -1, hidden_states.shape[1])
        gate, up = (rows @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        return (self.gate(gate, up) @ self.down_proj.transpose(1, 2)).flatten(0, 1)


class Router(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        top, chosen = logits.topk(2, dim=1)
        return torch.full_like(logits, -torch.inf).scatter(1, chosen, top).sigmoid(), logits


class ScalingBlock(nn.Module):
    """As that of Llama 4."""

    def __init__(self, share=1.0):
        super().__init__()
        self.experts, self.router, self.shared_expert = ScaledExperts(), Router(12, 6), nn.Linear(12, 12)
        self.top_k, self.share = 2, share

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, 12)
        scores, logits = self.router(x)
        routed = self.experts((x * scores.T[..., None]).flatten(0, 1))
        return self.shared_expert(x) + self.share * routed.view(6, -1, 12).sum(0), logits


def test_a_block_that_scales_inputs_is_compared_as_a_whole():
    model = nn.ModuleList([ScalingBlock()])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (experts,) = find_experts(model)
    assert experts.scaling_block is model[0]
    check_formulas([experts])
    assert "forward" not in vars(experts.module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"0.experts \(ScaledExperts\) computes something else"):
        check_formulas(find_experts(nn.ModuleList([ScalingBlock(share=0.9)])))
    with pytest.raises(ValueError, match=r"is called with \(hidden_states\) and not with"):
        find_experts(ScaledExperts())  # alone


class WithZeroExperts(Experts):
    """As LongCat-Flash: the last two ids are of experts without weights, which return their rows times ``share``."""

    def __init__(self, share=1.0):
        super().__init__()
        self.share, rows = share, self.gate_up_proj
        self.gate_up_proj = nn.Parameter(torch.cat([rows.detach(), rows[:2].detach()]))
        self.top_k = 5  # of 8, so that every row has some of both

    def forward(self, hidden_states, top_k_index, top_k_weights):
        num_experts, is_zero = len(self.down_proj), top_k_index >= len(self.down_proj)
        rest = Experts(num_experts)
        rest.gate_up_proj, rest.down_proj = nn.Parameter(self.gate_up_proj[:num_experts]), self.down_proj
        out = rest(hidden_states, top_k_index, top_k_weights)
        return out + self.share * hidden_states * (top_k_weights * is_zero).sum(1, keepdim=True)


def test_zero_experts_return_their_rows():
    (experts,) = find_experts(WithZeroExperts())
    assert (experts.num_experts, experts.num_zero_experts) == (6, 2)
    check_formulas([experts])
    with pytest.raises(ValueError, match="computes something else"):
        check_formulas(find_experts(WithZeroExperts(share=0.5)))

"""Loads of experts are those of all tokens, once; biases follow them, in every kind of model that has one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_balance_jobs as jobs
from fsdp_models import make_model
from fsdp_runs import Run

from fusco.fsdp.dispatcher import ExpertCopies
from fusco.fsdp.experts import find_experts

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(
    ("dispatcher", "recomputes"),
    [
        ("torch", "full"),
        ("fusco", "selective"),
        ("fusco", "by transformers"),
    ],
)
def test_rows_are_counted_once(four, recomputes, dispatcher):
    """Of two microbatches, and not those of an evaluation or of recomputation."""
    run = Run(recomputes=recomputes, dispatcher=dispatcher)
    nums = tuple(max(1, num) for num in run.nums_sequences)
    both = jobs.loads_alone("qwen3", nums, range(jobs.NUM_MICROBATCHES))
    one = jobs.loads_alone("qwen3", nums, range(1))
    for first, second, third in four.run(jobs.loads_of_a_step, run):
        assert first == both
        assert second == one
        assert not any(map(any, third))


@pytest.mark.parametrize("dispatcher", ["fusco", "torch"])
def test_forced_balance_is_even(four, dispatcher):
    for loads in four.run(jobs.balanced, dispatcher):
        assert {rows for layer in loads for rows in layer} == {4 * 2 * 6 * 3 // 8}


def test_a_bias_balances_and_is_equal_on_all_ranks(four):
    (busiest, (bias,)), *others = four.run(jobs.train_with_bias, 15)
    assert busiest[-1] < 0.75 * busiest[0]
    assert abs(float(bias.sum())) < 1e-5
    for _, (other,) in others:
        assert torch.equal(other, bias)


def test_a_kind_of_each_place_of_a_bias_is_updated(two):
    """As the page says, which names all kinds; ``make test-architectures`` has all."""
    chosen = {kinds[0]: place for place, kinds in jobs.biases_of_page().items()}
    assert len(chosen) >= 8
    assert two.run(jobs.update_all_kinds, list(chosen)) == [chosen] * 2


def test_what_cannot_be_balanced_is_named(two):
    for no_bias, narrow, rate, plain in two.run(jobs.errors_of_update):
        assert "the routers of this FSDPQwen3MoeForCausalLM have no bias (e_score_correction_bias" in no_bias
        assert "model.layers.1.mlp.gate.e_score_correction_bias is torch.bfloat16, in which steps" in narrow
        assert rate == "rate must be positive, got 0"
        assert "Qwen3MoeForCausalLM has no experts that fusco moves tokens to: parallelize it first" in plain


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_copies_are_computed_without_joining_weights(kind, monkeypatch):
    """Joining would copy the weights of all experts in every layer."""
    model = make_model(kind)
    experts = find_experts(model)[0]
    weights = experts.weights()
    copies = {name: torch.randn(2, *weight.shape[1:]) for name, weight in weights.items()}
    num_rows = torch.tensor([3] * len(weights["down_proj"]) + [2, 0])
    rows = torch.randn(int(num_rows.sum()), model.config.hidden_size)
    joined = {name: torch.cat([weight, copies[name]]) for name, weight in weights.items()}
    expected, cat, dims = experts._run(joined, rows, num_rows), torch.cat, set()

    def noted(tensors, *arguments, **options):
        dims.update(each.dim() for each in tensors)
        return cat(tensors, *arguments, **options)

    monkeypatch.setattr(torch, "cat", noted)
    assert torch.equal(experts.run(rows, num_rows, ExpertCopies(copies)), expected)
    assert dims == {2}

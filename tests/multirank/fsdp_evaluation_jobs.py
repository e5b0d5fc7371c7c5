"""Functions on ranks: a parallelized model that is evaluated during its training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_models import loss_sum, make_batch, make_model, num_targets, together
from fsdp_runs import Run, difference, mesh_of, parallel
from torch import nn

from fusco import fsdp

WHENS = (
    "before the optimizer is made",
    "before the backward pass",
    "while gradients accumulate",
    "before gradients are clipped",
)
NUMS_SEQUENCES = (2, 1)


def evaluate(model: nn.Module, how: str) -> None:
    """Run a model without gradients: once, or to generate a few tokens."""
    batch = make_batch(dist.get_rank(), 2, step=9)
    with torch.inference_mode() if how == "inference mode" else torch.no_grad():
        if how == "generate":
            model.generate(input_ids=batch.ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
        else:
            loss_sum(model, batch)


def differences_of_evaluated_training(
    _: dist.ProcessGroup, when: str, how: str, reshard_after_forward: bool
) -> dict[str, float]:
    """Return differences of parameters after a clipped step on two batches from one process, and of the norm."""
    rank = dist.get_rank()
    expected = make_model("qwen3")
    batches = [together(NUMS_SEQUENCES, index) for index in range(2)]
    num_all = sum(map(num_targets, batches))
    sum(loss_sum(expected, batch) / num_all for batch in batches).backward()
    theirs = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()

    run = Run(nums_sequences=NUMS_SEQUENCES)
    with parallel(run, reshard_after_forward=reshard_after_forward) as (model, _):
        if when == "before the optimizer is made":
            evaluate(model, how)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for index in range(2):
            model.set_requires_gradient_sync(index == 1)
            loss = loss_sum(model, make_batch(rank, NUMS_SEQUENCES[rank], index)) / num_all
            if when == "before the backward pass":
                evaluate(model, how)
            loss.backward()
            if when == "while gradients accumulate" and index == 0:
                evaluate(model, how)
        if when == "before gradients are clipped":
            evaluate(model, how)
        ours = fsdp.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        weights = model.state_dict()
        differences = {
            name: float((weights[name].full_tensor() - parameter).detach().abs().max())
            for name, parameter in expected.named_parameters()
        }
    return {"norm": abs(float(ours / theirs) - 1), **differences}


def error_of_a_norm_after_a_discarded_forward_pass(_: dist.ProcessGroup) -> str:
    """Return the error of clipping after a forward pass with gradients that follows the backward pass."""
    run = Run(nums_sequences=NUMS_SEQUENCES)
    with parallel(run) as (model, _):
        batch = make_batch(dist.get_rank(), 1)
        loss_sum(model, batch).backward()
        before = fsdp.grad_norm(model.parameters())
        loss_sum(model, batch)
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is looked at by the test
            fsdp.clip_grad_norm_(model.parameters(), 1.0)
        evaluate(model, "no grad")
        assert fsdp.grad_norm(model.parameters()) == before
    return str(error.value)


def differences_with_adapters(_: dist.ProcessGroup) -> dict[str, float]:
    """Return differences of gradients of adapters from one process; all else is frozen, experts too."""
    expected, rank = make_adapted_model(), dist.get_rank()
    batch = together(NUMS_SEQUENCES)
    (loss_sum(expected, batch) / num_targets(batch)).backward()
    mesh = mesh_of(2, 1)
    model = make_adapted_model()
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    (loss_sum(model, make_batch(rank, NUMS_SEQUENCES[rank])) / num_targets(batch)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    theirs = {name: parameter.grad for name, parameter in expected.named_parameters() if parameter.grad is not None}
    assert grads.keys() == theirs.keys()
    return {name: difference(grad, theirs[name]) for name, grad in grads.items()}


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as LoRA's."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def make_adapted_model() -> nn.Module:
    model = make_model("qwen3").requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model

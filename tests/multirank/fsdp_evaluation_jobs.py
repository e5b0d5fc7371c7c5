"""Functions on ranks: a parallelized model that is evaluated somewhere in the middle of its training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_jobs import Run, parallel
from fsdp_models import loss_sum, make_batch, make_model, num_targets, together
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
    """How far a clipped step on two batches takes parameters from those of one process; and the gradients' norm."""
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

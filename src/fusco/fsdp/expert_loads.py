"""The load of every expert, rows of all ranks by layer; and balance without a loss: a bias moved against the loads.

Source: Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), and DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fusco.fsdp.experts import Experts
from fusco.fsdp.layer import layers_of

_CALLER = "caller"  # the reader of ``expert_loads``
# Names of such biases in transformers 5.24, below the module that has router and experts: buffers or frozen parameters.
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
_READER = "bias"


def expert_loads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the rows of each expert since ``reset_expert_loads``, or since the model was parallelized; a collective.

    Counted are rows that were dispatched in forward passes with gradients: those of all microbatches, of all ranks, and
    only once with activation checkpointing. Evaluation (``torch.no_grad``) does not count.

    Returns:
        For the name of each module of experts, in order of layers, int64 (num_experts,), on the device of the rows.

    Raises:
        ValueError: for a model without experts that fusco moves tokens to.
    """
    return read_loads(model, _CALLER)


def reset_expert_loads(model: nn.Module) -> None:
    """Begin to count anew for ``expert_loads``; not a collective. Others, such as ``update_expert_bias``, go on."""
    mark_loads(model, _CALLER)


def read_loads(model: nn.Module, reader: str) -> dict[str, torch.Tensor]:
    """Return loads as ``expert_loads``, since a reader's mark; a collective."""
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts that fusco moves tokens to: parallelize it first")
    local = [each.counter.since_mark(reader) for each in layers.values()]
    one = next(iter(layers.values())).experts
    device = next((rows.device for rows in local if rows is not None), one.local(one.up_name).device)
    sizes = [each.experts.num_experts for each in layers.values()]
    whole = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    parts = torch.split(whole, sizes)
    for each, rows, part in zip(layers.values(), local, parts, strict=True):
        if rows is not None:
            first = each.dispatcher.group.rank() * len(rows)
            part[first : first + len(rows)] = rows
    if dist.is_initialized():
        dist.all_reduce(whole)
    return dict(zip(layers, parts, strict=True))


def mark_loads(model: nn.Module, reader: str) -> None:
    """Begin to count anew for a reader."""
    for each in layers_of(model).values():
        each.counter.mark(reader)


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """How evenly the experts of a layer are loaded."""

    busiest: float  # rows of the busiest expert over those of the mean expert; 1 is even
    cv: float  # coefficient of variation: standard deviation over mean; 0 is even
    num_idle: int  # experts without any row


def summarize_loads(loads: Mapping[str, torch.Tensor]) -> dict[str, LoadSummary]:
    """Return a summary of each layer's loads.

    >>> summarize_loads({"layers.0": torch.tensor([4, 2, 0, 2])})["layers.0"]
    LoadSummary(busiest=2.0, cv=0.7071, num_idle=1)
    """
    summaries = {}
    for name, rows in loads.items():
        counts = rows.double().cpu()
        mean = float(counts.mean())
        summaries[name] = LoadSummary(
            busiest=round(float(counts.max()) / mean, 4) if mean else 0.0,
            cv=round(float(counts.std(correction=0)) / mean, 4) if mean else 0.0,
            num_idle=int((counts == 0).sum()),
        )
    return summaries


@torch.no_grad()
def update_expert_bias(model: nn.Module, rate: float) -> None:
    """Move the bias of each layer's router by ``rate`` against the loads since the last update; a collective.

    Experts with more rows than the mean get less, those with fewer get more (the sign rule of the source), and the
    changes of a layer are re-centred: they add up to zero. Call it after a step of the optimizer. Loads are those of
    all microbatches and ranks, so biases stay equal on all ranks. They are in checkpoints and exports.

    A bias may have entries that belong to no expert (ZAYA's last one skips the layer): they stay. Layers without a bias
    are left out if others have one (DeepSeek-V4).

    Args:
        model: parallelized, of a kind with such a bias; ``docs/training/runs.md`` has a table.
        rate: of a step; 0.001 in the source, 0.01 for runs of a few hundred steps.

    Raises:
        ValueError: for a model without such biases, a bias in bfloat16 or float16, in which small steps vanish, a bias
            whose whole copy is still gathered (before the backward pass), or a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate must be positive, got {rate}")
    biases = find_expert_biases(model)
    for name, rows in read_loads(model, _READER).items():
        if name not in biases or not rows.any():
            continue
        loads = rows.double()
        delta = rate * (loads.mean() - loads).sign()
        _add(biases[name], delta - delta.mean(), len(rows))
    mark_loads(model, _READER)


def find_expert_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the biases of routers by the names of their experts; raises as ``update_expert_bias``."""
    layers = layers_of(model)
    found = {name: bias for name, each in layers.items() if (bias := _find_bias(model, name, each.experts)) is not None}
    if layers and not found:
        raise ValueError(
            f"the routers of this {type(model).__name__} have no bias ({', '.join(BIAS_NAMES)}), so loss-free "
            f"balancing is not for it: use a router loss"
        )
    return found


def _find_bias(model: nn.Module, name_of_experts: str, experts: Experts) -> torch.Tensor | None:
    block_name = name_of_experts.rpartition(".")[0]
    block = model.get_submodule(block_name)
    found = {
        f"{block_name}.{name}".removeprefix("."): tensor
        for name, tensor in (*block.named_buffers(), *block.named_parameters())
        if name.rpartition(".")[2] in BIAS_NAMES and tensor.shape[-1] >= experts.num_experts
    }
    if not found:
        return None  # as in the layers of DeepSeek-V4 that route by a hash
    if len(found) > 1:
        raise ValueError(f"{block_name} ({type(block).__name__}) has several biases of experts: {', '.join(found)}")
    ((name, bias),) = found.items()
    if bias.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} is {bias.dtype}, in which steps of balancing vanish: keep it in float32, as from_pretrained does"
        )
    is_sharded = isinstance(getattr(experts.module, experts.up_name), DTensor)
    if isinstance(bias, nn.Parameter) and is_sharded and not isinstance(bias, DTensor):
        raise ValueError(f"{name} is gathered: update it after the backward pass, when it is sharded again")
    return bias


def _add(bias: torch.Tensor, delta: torch.Tensor, num_experts: int) -> None:
    """Add to a bias (..., num_experts or more), sharded or not."""
    whole = torch.zeros(bias.shape, dtype=bias.dtype, device=delta.device)
    whole[..., :num_experts] = delta.to(bias.dtype)
    if isinstance(bias, DTensor):
        sharded = distribute_tensor(whole, bias.device_mesh, bias.placements, src_data_rank=None)
        bias.to_local().add_(sharded.to_local())
    else:
        bias.add_(whole.to(bias.device))

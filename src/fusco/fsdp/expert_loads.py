"""The load of every expert: rows of all ranks, by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fusco.fsdp.layer import ExpertParallelLayer, layer_of

_CALLER = "caller"  # the reader of ``expert_loads``


@dataclass(frozen=True, eq=False)
class CountedLayer:
    """A layer whose rows are counted."""

    name: str  # of its module of experts
    layer: ExpertParallelLayer

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.layer.experts.num_experts


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
    layers = counted_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts that fusco moves tokens to: parallelize it first")
    local = [each.layer.counter.since_mark(reader) for each in layers]
    device = next((rows.device for rows in local if rows is not None), _device_of(layers[0]))
    whole = torch.zeros(sum(each.num_experts for each in layers), dtype=torch.int64, device=device)
    parts = torch.split(whole, [each.num_experts for each in layers])
    for each, rows, part in zip(layers, local, parts, strict=True):
        if rows is not None:
            first = each.layer.dispatcher.group.rank() * len(rows)
            part[first : first + len(rows)] = rows
    if dist.is_initialized():
        dist.all_reduce(whole)
    return {each.name: part for each, part in zip(layers, parts, strict=True)}


def mark_loads(model: nn.Module, reader: str) -> None:
    """Begin to count anew for a reader."""
    for each in counted_layers(model):
        each.layer.counter.mark(reader)


def counted_layers(model: nn.Module) -> list[CountedLayer]:
    """Return a model's layers whose rows are counted, in order."""
    found = []
    for name, module in model.named_modules():
        if layer := layer_of(module):
            found.append(CountedLayer(name, layer))
    return found


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


def _device_of(layer: CountedLayer) -> torch.device:
    device: torch.device = layer.layer.experts.local(layer.layer.experts.up_name).device
    return device

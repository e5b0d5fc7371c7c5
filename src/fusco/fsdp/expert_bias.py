"""Balance of experts without a loss: a bias on the router's scores, moved against each expert's load.

Source: Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), and DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fusco.fsdp.expert_loads import CountedLayer, counted_layers, mark_loads, read_loads

# Names of such biases in transformers 5.24, below the module that has router and experts: buffers or frozen parameters.
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
_READER = "bias"


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
    layers = counted_layers(model)
    found = {each.name: bias for each in layers if (bias := _find_bias(model, each)) is not None}
    if layers and not found:
        raise ValueError(
            f"the routers of this {type(model).__name__} have no bias ({', '.join(BIAS_NAMES)}), so loss-free "
            f"balancing is not for it: use a router loss"
        )
    return found


def _find_bias(model: nn.Module, layer: CountedLayer) -> torch.Tensor | None:
    block_name = layer.name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    found = {
        f"{block_name}.{name}".removeprefix("."): tensor
        for name, tensor in (*block.named_buffers(), *block.named_parameters())
        if name.rpartition(".")[2] in BIAS_NAMES and tensor.shape[-1] >= layer.num_experts
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
    experts = layer.layer.experts
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

"""Models too large for one rank: parameters without memory until they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fusco.fsdp.adapters import initialize_adapters
from fusco.fsdp.wrapping import is_offloaded


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create modules whose parameters are on the meta device, and whose buffers are real.

    ``with torch.device("meta")`` would drop the values of buffers, too, and some (such as the frequencies of rotary
    embeddings) are in no checkpoint. Each parameter has memory only while its module creates it. While the block runs,
    modules created in other threads are affected as well.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate a parallelized model's parameters, each rank its part; load a checkpoint afterwards.

    LoRA adapters (peft) get the values that peft starts from, which is a collective of all ranks; others warn.

    Args:
        model: made in ``parameters_on_meta`` and parallelized.
        device: of parameters and buffers; parameters that are offloaded are in main memory. Buffers keep their values.

    Raises:
        ValueError: for a buffer without values.
    """
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ValueError(f"buffer {name} has no values: make the model in fusco.fsdp.parameters_on_meta()")
    model.to_empty(device="cpu" if is_offloaded(model) else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    initialize_adapters(model)

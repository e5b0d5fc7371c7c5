"""Models that are too large to be made whole on every rank: parameters without memory until they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make modules whose parameters have shapes but no memory. Buffers are real, so what they hold is right.

    ``with torch.device("meta")`` would take the values of buffers, too, and some (such as the frequencies of rotary
    embeddings) are in no checkpoint. Each parameter has memory for as long as its module needs to make it. While the
    block runs, modules made in other threads are affected as well.
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
    """Give a parallelized model's parameters memory, each rank for its own part; values come from a checkpoint then.

    Args:
        model: made in ``parameters_on_meta`` and parallelized.
        device: to put parameters and buffers on. Buffers keep their values.

    Raises:
        ValueError: for a buffer without values.

    """
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ValueError(f"buffer {name} has no values: make the model in fusco.fsdp.parameters_on_meta()")
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

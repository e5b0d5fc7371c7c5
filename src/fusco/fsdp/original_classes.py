"""The original classes of a sharded model's modules, which transformers looks up by name and FSDP2 replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes that modules had before ``fully_shard``, for the duration of the block.

    ``fully_shard`` derives a class ``FSDP<Name>`` in a PyTorch module. transformers (5.23) finds the names of weights
    in files by the name of a class, and treats a class from another module as user code, without such names. Only
    classes change: hooks and state of FSDP stay. The model must not run in the block.
    """
    sharded: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    try:
        for module, sharded_class in sharded:
            module.__class__ = original_class(sharded_class)
        yield
    finally:
        for module, sharded_class in sharded:
            module.__class__ = sharded_class


def original_class(sharded_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``fully_shard`` derived this one from; any other class is returned as it is."""
    if FSDPModule not in sharded_class.__bases__:
        return sharded_class
    (original,) = (base for base in sharded_class.__bases__ if base is not FSDPModule)
    return original

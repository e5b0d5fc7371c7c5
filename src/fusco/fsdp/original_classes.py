"""The classes that a sharded model's modules had before: FSDP2 gives them others, and transformers goes by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before ``fully_shard``, for as long as the block runs.

    ``fully_shard`` derives a class ``FSDP<Name>``, in a Python module of PyTorch's. transformers (5.23) looks up by the
    name of a class what its weights are called in files, and takes a class from elsewhere for a user's code, which none
    of that applies to. Only classes change: hooks and state of FSDP stay. The model must not run in the block.
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
    """The class that ``fully_shard`` derived this one from; another class itself."""
    if FSDPModule not in sharded_class.__bases__:
        return sharded_class
    (original,) = (base for base in sharded_class.__bases__ if base is not FSDPModule)
    return original

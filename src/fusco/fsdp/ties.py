"""Reject tied parameters in modules that FSDP shards separately."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def check_ties(model: nn.Module, wrapped: Iterable[nn.Module]) -> None:
    """Raise for a parameter that is in several of the modules that FSDP wraps separately.

    FSDP shards it once for each of them; each copy is then trained and saved separately. Within one module, such as
    embeddings and output weights of the root, it stays one parameter.

    Args:
        model: the root, not sharded yet.
        wrapped: modules within it that FSDP wraps separately.

    Raises:
        ValueError: with both names of the first such parameter.
    """
    units = set(wrapped)
    first: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    innermost: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        enclosing = innermost.get(prefix.rpartition(".")[0], model)
        innermost[prefix] = unit = module if module in units else enclosing
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}".removeprefix(".")
            known, its_unit = first.setdefault(parameter, (name, unit))
            if its_unit is not unit:
                raise ValueError(
                    f"{known} and {name} are one parameter, but FSDP shards their modules separately, which would "
                    f"train two copies: untie them, or parallelize one of these modules alone"
                )

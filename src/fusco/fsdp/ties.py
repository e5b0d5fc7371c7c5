"""Whether parameters that modules share stay one when FSDP shards modules apart."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def check_ties(model: nn.Module, wrapped: Iterable[nn.Module]) -> None:
    """Refuse a parameter that is in several of the modules that are wrapped each on its own.

    FSDP shards it once for each of them, and from then on each has, trains and saves its own. Within one module, such
    as embeddings and output weights of the root, it stays one.

    Args:
        model: the root, not sharded yet.
        wrapped: modules within it that get an FSDP unit of their own.

    Raises:
        ValueError: with both names of the first such parameter.

    """
    units = set(wrapped)
    first: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    innermost: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        around = innermost.get(prefix.rpartition(".")[0], model)
        innermost[prefix] = unit = module if module in units else around
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}".removeprefix(".")
            known, its_unit = first.setdefault(parameter, (name, unit))
            if its_unit is not unit:
                raise ValueError(
                    f"{known} and {name} are one parameter, but in modules that FSDP shards apart, which would train "
                    f"them apart: untie them, or parallelize one of these modules alone"
                )

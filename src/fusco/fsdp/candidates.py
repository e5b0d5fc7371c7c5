"""Modules that look like experts but cannot be distributed, with the reason, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_MAX_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that looks like experts."""

    name: str  # of the module in its model
    module: nn.Module  # the module
    obstacle: str  # the reason why it cannot be distributed

    def describe(self) -> str:
        """Return the candidate's class, parameters and obstacle, without its name."""
        if isinstance(self.module, (nn.ModuleList, nn.ModuleDict)):
            classes = sorted({type(child).__name__ for child in self.module.children()})
            what = f"{type(self.module).__name__} of {len(self.module)} {' and '.join(classes)}"
        else:
            what = type(self.module).__name__
        shapes = [f"{key} {tuple(parameter.shape)}" for key, parameter in self.module.named_parameters(recurse=False)]
        return f"({what}) has {', '.join(shapes) or 'no direct parameters'}: {self.obstacle}"


def looks_like_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module looks like experts: by its name, its class, or a stack of matrices in it.

    A module counts only if it has direct parameters or is a list of modules; a wrapper around one does not.
    """
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    is_convolution = hasattr(module, "kernel_size")
    if any(len(shape) == 3 and shape[0] > 1 for shape in shapes) and not is_convolution:
        return True
    is_named_so = "expert" in name.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
    return is_named_so and (bool(shapes) or is_list)


def describe_candidates(candidates: Iterable[Candidate]) -> str:
    """Return all candidates, each kind once, as text to append to an error; empty if there is none."""
    text_to_names: dict[str, list[str]] = {}
    for candidate in candidates:
        text_to_names.setdefault(candidate.describe(), []).append(candidate.name or "the model itself")
    texts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {text}"
        for text, names in text_to_names.items()
    ]
    left_out = f"; and {len(texts) - _MAX_SHOWN} kinds more" if len(texts) > _MAX_SHOWN else ""
    return f". What looks like experts: {'; '.join(texts[:_MAX_SHOWN])}{left_out}" if texts else ""

"""Reshard parameters after a forward pass without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_MARK = "_fusco_is_whole_copy"


def reshard_after_evaluation(model: nn.Module) -> None:
    """Make a wrapped model reshard all its parameters after each forward pass without gradients.

    FSDP2 reshards some parameters in the backward pass only: the root's, and all of them with
    ``reshard_after_forward=False``. Without a backward pass these would stay whole copies. An optimizer made then would
    train these copies, which the next forward pass overwrites, and norms would miss the gradients, which belong to the
    shards. After a forward pass with gradients, whole copies are left in place and marked.

    Whole copies created in inference mode cannot be trained, and FSDP2 keeps those that it creates first. So before a
    first forward pass in inference mode all parameters are gathered once outside of it, a module at a time.
    """
    hooks = _Hooks()
    model.register_forward_pre_hook(hooks.before, prepend=True)
    model.register_forward_hook(hooks.after)


def is_whole_copy(parameter: torch.Tensor) -> bool:
    """Return whether this is the whole copy of a sharded parameter, as between forward and backward pass."""
    return getattr(parameter, _MARK, False)


class _Hooks:
    """The forward hooks of one model."""

    def __init__(self) -> None:
        self._has_gathered = self._has_marked = False

    @torch.compiler.disable(reason="FSDP2's hooks are not compiled either")  # type: ignore[untyped-decorator,no-untyped-call]
    def before(self, model: nn.Module, args: Any) -> None:  # noqa: ARG002  the signature of a hook
        if torch.is_inference_mode_enabled() and not self._has_gathered:
            with torch.inference_mode(mode=False), torch.no_grad():
                for module in _wrapped(model):
                    module.unshard()
                    module.reshard()
        self._has_gathered = True

    @torch.compiler.disable(reason="FSDP2's hooks are not compiled either")  # type: ignore[untyped-decorator,no-untyped-call]
    def after(self, model: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002  the signature of a hook
        if not torch.is_grad_enabled():
            for module in _wrapped(model):
                module.reshard()
        elif not self._has_marked:  # FSDP2 creates each copy once and refills it
            for parameter in model.parameters():
                if not isinstance(parameter, DTensor):
                    setattr(parameter, _MARK, True)
            self._has_marked = True


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

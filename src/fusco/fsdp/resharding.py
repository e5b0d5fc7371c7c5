"""Sharding parameters again after a forward pass without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_MARK = "_fusco_is_whole_copy"


def reshard_after_evaluation(model: nn.Module) -> None:
    """Have a wrapped model shard all its parameters again after each forward pass without gradients.

    FSDP2 leaves to the backward pass what it does not shard again after the forward pass: the root's parameters, and
    all of them with ``reshard_after_forward=False``. Where no backward pass follows, the module's parameters would stay
    whole copies. An optimizer made then would train these copies, which the next forward pass overwrites, and
    gradients, which belong to the shards, would be missing in norms. After a forward pass with gradients, whole copies
    are left where they are and marked as such.

    Whole copies made in inference mode cannot be trained with, and FSDP2 keeps what it made first. So before a first
    forward pass in inference mode all parameters are gathered once outside of it, a module at a time.
    """
    hooks = _Hooks()
    model.register_forward_pre_hook(hooks.before, prepend=True)
    model.register_forward_hook(hooks.after)


def is_whole_copy(parameter: nn.Parameter) -> bool:
    """Whether this is the copy of a sharded parameter that a module has between forward and backward pass."""
    return getattr(parameter, _MARK, False)


class _Hooks:
    """Of one model."""

    def __init__(self) -> None:
        self._has_gathered = self._has_marked = False

    @torch.compiler.disable(reason="as FSDP2's hooks")  # type: ignore[untyped-decorator,no-untyped-call]
    def before(self, model: nn.Module, args: Any) -> None:  # noqa: ARG002  PyTorch calls it with these
        if torch.is_inference_mode_enabled() and not self._has_gathered:
            with torch.inference_mode(mode=False), torch.no_grad():
                for module in _wrapped(model):
                    module.unshard()
                    module.reshard()
        self._has_gathered = True

    @torch.compiler.disable(reason="as FSDP2's hooks")  # type: ignore[untyped-decorator,no-untyped-call]
    def after(self, model: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002  PyTorch calls it with these
        if not torch.is_grad_enabled():
            for module in _wrapped(model):
                module.reshard()
        elif not self._has_marked:  # FSDP2 makes each copy once, and fills it again and again
            for parameter in model.parameters():
                if not isinstance(parameter, DTensor):
                    setattr(parameter, _MARK, True)
            self._has_marked = True


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

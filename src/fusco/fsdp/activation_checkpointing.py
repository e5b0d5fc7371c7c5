"""Activation checkpointing: blocks compute again in the backward pass what they do not keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fusco.fsdp import ops as _ops  # noqa: F401  defines torch.ops.fusco

Checkpointing = Literal["none", "full", "selective"]

# What moves rows: by FuscoDispatcher, and by TorchDispatcher. Also for create_selective_checkpoint_contexts.
SHUFFLE_OPS = [
    torch.ops.fusco.dispatch.default,
    torch.ops.fusco.combine.default,
    torch.ops._c10d_functional.all_to_all_single.default,  # noqa: SLF001  the name is PyTorch's
]
# What blocks of transformers are given a cache of keys and values as.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def check_checkpointing(how: Checkpointing) -> None:
    """Raise ``ValueError`` for an unknown one."""
    if how not in get_args(Checkpointing):
        raise ValueError(f"activation_checkpointing must be one of {get_args(Checkpointing)}, got {how!r}")


def checkpoint_blocks(blocks: Iterable[nn.Module], how: Checkpointing) -> None:
    """Have blocks checkpoint themselves, within what FSDP does before and after them; names of parameters stay.

    With gradients on they refuse a cache, to which computing again would append once more, with ``ValueError``.
    """
    if how == "none":
        return
    keeping: dict[str, Any] = {"context_fn": _keep_shuffles} if how == "selective" else {}
    for block in blocks:
        block.forward = partial(_checkpointed, partial(checkpoint, block.forward, use_reentrant=False, **keeping))


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    caches = [name for name in _CACHES if kwargs.get(name) is not None]
    if caches and torch.is_grad_enabled():
        raise ValueError(
            f"with activation checkpointing a block cannot be trained with {caches[0]}, to which it would append "
            f"twice: call the model with use_cache=False"
        )
    return forward(*args, **kwargs)


def _keep_shuffles() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts for the forward pass and for computing again: shuffles happen in the first only.

    As ``torch.utils.checkpoint.create_selective_checkpoint_contexts(SHUFFLE_OPS)``, which however counts *all*
    operations (PyTorch 2.13) and gives up where FSDP gathers the parameters of a block's experts between them at one
    time and not at the other.
    """
    kept: deque[_Kept] = deque()
    return _Keeping(kept), _Reusing(kept)


class _Kept:
    """What an operation gave, and how often it had been changed since."""

    def __init__(self, outputs: Any) -> None:
        # Below autograd, where dispatch modes work, a detached tensor counts changes together with the original only if
        # told so.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001, FBT003
            self._outputs = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        self._versions = self._count_changes()

    def take(self) -> Any:
        if self._count_changes() != self._versions:
            raise RuntimeError("the output of a dispatch or combine was changed in place and cannot be used again")
        return self._outputs

    def _count_changes(self) -> list[int]:
        versions: list[int] = []
        tree_map_only(torch.Tensor, lambda tensor: versions.append(tensor._version), self._outputs)  # noqa: SLF001
        return versions


class _Keeping(TorchDispatchMode):
    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in SHUFFLE_OPS:
            self._kept.append(_Kept(outputs))
        return outputs


class _Reusing(TorchDispatchMode):
    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in SHUFFLE_OPS:
            return func(*args, **(kwargs or {}))
        if not self._kept:
            raise RuntimeError("selective activation checkpointing keeps shuffles for one backward pass, not for two")
        return self._kept.popleft().take()

"""Activation checkpointing: blocks recompute in the backward pass what they do not save."""

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

# The operators that move rows, of both dispatchers. Also an argument for create_selective_checkpoint_contexts.
SHUFFLE_OPS = [
    torch.ops.fusco.dispatch.default,
    torch.ops.fusco.combine.default,
    torch.ops._c10d_functional.all_to_all_single.default,  # noqa: SLF001  the name is PyTorch's
]
# Argument names under which blocks of transformers get a key-value cache.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def check_checkpointing(how: Checkpointing) -> None:
    """Raise ``ValueError`` for an unknown mode."""
    if how not in get_args(Checkpointing):
        raise ValueError(f"activation_checkpointing must be one of {get_args(Checkpointing)}, got {how!r}")


def checkpoint_blocks(blocks: Iterable[nn.Module], how: Checkpointing) -> None:
    """Replace the ``forward`` of blocks by a checkpointed one, inside FSDP's hooks; parameter names do not change.

    With gradients enabled a block raises ``ValueError`` for a cache, since recomputing would append to it again.
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
    """Return contexts for the forward pass and for recomputing: shuffles run in the first only.

    As ``torch.utils.checkpoint.create_selective_checkpoint_contexts(SHUFFLE_OPS)``, which counts *all* operations
    (PyTorch 2.13), however, and fails where FSDP gathers the parameters of a block's experts in one of the two passes
    only.
    """
    kept: deque[_Kept] = deque()
    return _Shuffles(kept, is_recomputing=False), _Shuffles(kept, is_recomputing=True)


class _Kept:
    """The outputs of an operation, and their version counters when they were saved."""

    def __init__(self, outputs: Any) -> None:
        # Dispatch modes run below autograd. There a detached tensor shares the version counter of the original only if
        # this key is not excluded.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001, FBT003
            self._outputs = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        self._versions = self._count_changes()

    def take(self) -> Any:
        if self._count_changes() != self._versions:
            raise RuntimeError("the output of a dispatch or combine was changed in place and cannot be reused")
        return self._outputs

    def _count_changes(self) -> list[int]:
        versions: list[int] = []
        tree_map_only(torch.Tensor, lambda tensor: versions.append(tensor._version), self._outputs)  # noqa: SLF001
        return versions


class _Shuffles(TorchDispatchMode):
    """Keeps the outputs of shuffles; or, while a block is recomputed, returns those instead of running shuffles."""

    def __init__(self, kept: deque[_Kept], *, is_recomputing: bool) -> None:
        super().__init__()
        self._kept, self._is_recomputing = kept, is_recomputing

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_shuffle = func in SHUFFLE_OPS
        if is_shuffle and self._is_recomputing:
            if not self._kept:
                raise RuntimeError(
                    "selective activation checkpointing saves shuffles for one backward pass, not for two"
                )
            return self._kept.popleft().take()
        outputs = func(*args, **(kwargs or {}))
        if is_shuffle:
            self._kept.append(_Kept(outputs))
        return outputs

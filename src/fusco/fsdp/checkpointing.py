"""Activation checkpointing: blocks keep their inputs and compute everything else again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

from torch import nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "full"]


def check_checkpointing(how: Checkpointing) -> None:
    """Raise ``ValueError`` for an unknown one."""
    if how not in get_args(Checkpointing):
        raise ValueError(f"activation_checkpointing must be one of {get_args(Checkpointing)}, got {how!r}")


def checkpoint_blocks(blocks: Iterable[nn.Module], how: Checkpointing) -> None:
    """Have blocks checkpoint themselves, within what FSDP does before and after them; names of parameters stay."""
    if how == "none":
        return
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

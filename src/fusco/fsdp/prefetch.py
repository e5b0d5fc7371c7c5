"""Which parameters FSDP gathers ahead of time: the next block's, and those of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, eq=False)
class Unit:
    """A block, and the modules of experts in it that are wrapped apart from it."""

    block: nn.Module
    experts: tuple[nn.Module, ...] = ()

    @property
    def wrapped(self) -> list[FSDPModule]:
        """The block and its experts, in the order in which they are needed, forward and (the block first) backward."""
        return [cast("FSDPModule", module) for module in (self.block, *self.experts)]


def set_prefetch(model: nn.Module, units: Sequence[Unit]) -> None:
    """Tell FSDP the order, as what it guesses by itself is one wrapped module ahead, and experts are one of their own.

    Forward, the model asks for the first block and its experts, each block for the next; backward, in reverse.
    """
    if not units:
        return
    cast("FSDPModule", model).set_modules_to_forward_prefetch(units[0].wrapped)
    cast("FSDPModule", model).set_modules_to_backward_prefetch(units[-1].wrapped)
    for unit, following in pairwise(units):
        cast("FSDPModule", unit.block).set_modules_to_forward_prefetch(following.wrapped)
        cast("FSDPModule", following.block).set_modules_to_backward_prefetch(unit.wrapped)

"""Checks that every rank makes for itself, and that all ranks act upon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from fusco.api.collective import REFUSALS

_Checked = TypeVar("_Checked")


def check_on_all_ranks(check: Callable[[], _Checked], device_type: str) -> _Checked:
    """What a check gives on this rank; a collective of the default group.

    Raises:
        TypeError, ValueError: what the check raises here; where it does so on other ranks only, ``ValueError`` with one
            of them.

    """
    checked: _Checked | None = None
    error: Exception | None = None
    try:
        checked = check()
    except REFUSALS as refusal:
        error = refusal
    refusing = torch.tensor(dist.get_rank() + 1 if error else 0, device=device_type)
    dist.all_reduce(refusing, dist.ReduceOp.MAX)
    if error:
        raise error
    if refusing:
        raise ValueError(f"rank {int(refusing) - 1} has refused what it was given; its error says why")
    return cast("_Checked", checked)

"""Run a local check on every rank, and raise on all ranks if it fails on any."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from fusco.api.collective import REFUSALS

_Checked = TypeVar("_Checked")


def check_on_all_ranks(check: Callable[[], _Checked], device_type: str) -> _Checked:
    """Run a check and return its result on this rank; a collective of the default group.

    Raises:
        TypeError, ValueError: the error of the check on this rank; if it fails on other ranks only, ``ValueError``
            naming one of them.
    """
    checked: _Checked | None = None
    error: Exception | None = None
    try:
        checked = check()
    except REFUSALS as refusal:
        error = refusal
    rejecting = torch.tensor(dist.get_rank() + 1 if error else 0, device=device_type)
    dist.all_reduce(rejecting, dist.ReduceOp.MAX)
    if error:
        raise error
    if rejecting:
        raise ValueError(f"rank {int(rejecting) - 1} rejected its arguments; see its error")
    return cast("_Checked", checked)

"""Launches of the latest dispatch and combine between nodes, from which repeated calls are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusco.cuda.kernels.gather_rows import Part
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.kernels.plan_forwarding import ForwardingTerms
from fusco.cuda.nccl import Message


@dataclass
class LatestDispatch:
    """Launches of the latest dispatch, to be repeated: all of it on one stream if it ``is_alone``.

    Attributes:
        terms: of its messages.
        forwarding: the launch of ``plan_forwarding``.
        packed: the routing that it has packed.
        gathers: launches of ``gather_rows``, with their parts and the number of the payload.
        sends: messages of rows in the first slice.
        receives: likewise.
        counts: of all ranks.
        plan: the launch of the plan.
        scatters: the launches of ``scatter_rows``.
    """

    terms: ForwardingTerms
    forwarding: PreparedLaunch
    packed: torch.Tensor
    gathers: list[tuple[PreparedLaunch, Sequence[Part], int]] = field(default_factory=list)
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    counts: Sequence[tuple[int, ...]] = ()
    plan: PreparedLaunch | None = None
    scatters: Sequence[PreparedLaunch] = ()
    is_alone: bool = False


@dataclass
class LatestCombine:
    """Launches of the latest combine, to be repeated.

    Attributes:
        sums: the launches of ``combine_rows``, slice by slice, and then of this node's tokens.
        add: the launch of ``add_returned``, or ``None``.
        sends: messages of sums in the last slice.
    """

    sums: list[PreparedLaunch] = field(default_factory=list)
    add: PreparedLaunch | None = None
    sends: Sequence[Message] = ()

"""Launches of the latest dispatch and combine between nodes, from which repeated calls are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.kernels.gather_rows import Part
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.kernels.plan_forwarding import ForwardingTerms


@dataclass
class LatestDispatch:
    """Launches of the latest dispatch, to be repeated: all of it on one stream if it ``is_alone``."""

    terms: ForwardingTerms  # of its messages
    forwarding: PreparedLaunch  # the launch of ``plan_forwarding``
    packed: torch.Tensor  # the routing that it has packed
    # launches of ``gather_rows``, with their parts and the number of the payload
    gathers: list[tuple[PreparedLaunch, Sequence[Part], int]] = field(default_factory=list)
    sends: Sequence[Message] = ()  # messages of rows in the first slice, sent
    receives: Sequence[Message] = ()  # likewise, received
    counts: Sequence[tuple[int, ...]] = ()  # of all ranks
    plan: PreparedLaunch | None = None  # the launch of the plan
    scatters: Sequence[PreparedLaunch] = ()  # the launches of ``scatter_rows``
    is_alone: bool = False


@dataclass
class LatestCombine:
    """Launches of the latest combine, to be repeated."""

    # the launches of ``combine_rows``, slice by slice, and then of this node's tokens
    sums: list[PreparedLaunch] = field(default_factory=list)
    add: PreparedLaunch | None = None  # the launch of ``add_returned``, or ``None``
    sends: Sequence[Message] = ()  # messages of sums in the last slice

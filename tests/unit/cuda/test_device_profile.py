"""What a CUDA engine's profile counts where no device is needed to know."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from engine_parts import engine_of

from fusco.core.profile import Call, CallProfile
from fusco.core.topology import Topology
from fusco.engine.base import AllToAllRequest
from fusco.schedule.cost import CUDA_LINKS

NUM_ROWS = ((4, 1, 2), (3, 9, 0), (5, 6, 7))  # [src][dst]


def profile_of(rank: int) -> CallProfile:
    """Of an all-to-all within one node, of rows of 8 bytes; nothing is moved."""
    sends = NUM_ROWS
    receives = tuple(zip(*NUM_ROWS, strict=True))
    rows = [torch.empty(sum(counts[rank]), 2) for counts in (sends, receives)]
    request = AllToAllRequest(input=rows[0], output=rows[1], send_rows=sends[rank], receive_rows=receives[rank])
    profile = CallProfile()
    engine = engine_of(
        topology=Topology((0, 0, 0)),
        rank=rank,
        network=None,
        watchdog=mock.Mock(),
        links=CUDA_LINKS,
        order=SimpleNamespace(on_stream=lambda *_: nullcontext(mock.Mock())),
        context=mock.Mock(),
        arena=SimpleNamespace(node_ranks=(0, 1, 2), layout=None),
    )
    pending = engine.prepare_all_to_all(request, Call(1, profile))
    assert pending.counts == [*sends[rank], *receives[rank]]
    with mock.patch("fusco.cuda.engine.exchange_rows"):
        pending.run([[*sends[r], *receives[r]] for r in range(3)])
    return profile


def test_an_all_to_all_within_a_node_counts_the_rows_of_other_ranks():
    assert [profile_of(rank).intranode_row_bytes for rank in range(3)] == [8 * (3 + 5), 8 * (1 + 6), 8 * (2 + 0)]

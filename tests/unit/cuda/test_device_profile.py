"""What a CUDA engine's profile counts where no device is needed to know."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch

from fusco.core.profile import Call, CallProfile
from fusco.core.topology import Topology
from fusco.cuda.engine import CudaEngine
from fusco.engine.base import AllToAllRequest
from fusco.schedule.cost import CUDA_LINKS

NUM_ROWS = ((4, 1, 2), (3, 9, 0), (5, 6, 7))  # [src][dst]


class Engine(CudaEngine):
    """An engine on one node, whose byte streams move nothing."""

    def __init__(self, rank: int) -> None:
        self._topology, self._rank, self._network, self._watchdog = Topology((0, 0, 0)), rank, None, mock.Mock()
        self._links = CUDA_LINKS
        self._order = SimpleNamespace(on_stream=lambda *_: nullcontext())

    def _streams(self, _stream):
        return SimpleNamespace(tasks=lambda *_: [])


def profile_of(rank: int) -> CallProfile:
    """Of an all-to-all within one node, of rows of 8 bytes; nothing is moved."""
    sends = NUM_ROWS
    receives = tuple(zip(*NUM_ROWS, strict=True))
    rows = [torch.empty(sum(counts[rank]), 2) for counts in (sends, receives)]
    request = AllToAllRequest(input=rows[0], output=rows[1], send_rows=sends[rank], receive_rows=receives[rank])
    profile = CallProfile()
    pending = Engine(rank).prepare_all_to_all(request, Call(1, profile))
    assert pending.counts == [*sends[rank], *receives[rank]]
    pending.run([[*sends[r], *receives[r]] for r in range(3)])
    return profile


def test_an_all_to_all_within_a_node_counts_the_rows_of_other_ranks():
    assert [profile_of(rank).intranode_row_bytes for rank in range(3)] == [8 * (3 + 5), 8 * (1 + 6), 8 * (2 + 0)]

"""What a CUDA engine's profile counts where no device is needed to know."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusco.control.fingerprint import Agreement, Record
from fusco.core.profile import CallProfile
from fusco.core.topology import Topology
from fusco.cuda.engine import CudaEngine
from fusco.engine.base import ExchangeOrder

NUM_ROWS = ((4, 1, 2), (3, 9, 0), (5, 6, 7))  # [src][dst]


def profile_of(rank: int) -> CallProfile:
    """Of an all-to-all within one node, of rows of 8 bytes; nothing is moved."""
    sends = NUM_ROWS
    receives = tuple(zip(*NUM_ROWS, strict=True))
    records = [Record(Agreement(""), (*sends[r], *receives[r])) for r in range(3)]
    engine: Any = object.__new__(CudaEngine)
    engine._topology, engine._rank, engine._network, engine._watch = Topology((0, 0, 0)), rank, None, mock.Mock()
    engine._rounds = SimpleNamespace(profile=CallProfile(), publish=lambda *_: records)
    engine._kernels = SimpleNamespace(num_sms=0)
    engine._order = SimpleNamespace(on_stream=lambda *_: nullcontext())
    engine._streams = SimpleNamespace(tasks=lambda *_: [])
    rows = [torch.empty(sum(counts[rank]), 2) for counts in (sends, receives)]
    order = ExchangeOrder(input=rows[0], output=rows[1], send_rows=sends[rank], receive_rows=receives[rank])
    engine.all_to_all(Agreement(""), order)
    profile: CallProfile = engine.profile
    return profile


def test_an_all_to_all_within_a_node_counts_the_rows_of_other_ranks():
    assert [profile_of(rank).intranode_row_bytes for rank in range(3)] == [8 * (3 + 5), 8 * (1 + 6), 8 * (2 + 0)]

"""The kernel ``exchange_rows``: an all-to-all within a node, through the rings of byte streams, without the host.

A rank's 512 channels, a warp each, have two chunks of 4 KiB under way to each rank, in the rings of 4 MiB that ranks
have by default. Alone it was not measured; in moves two H200 reached 60 GB/s (docs/performance/cuda.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

from fusco.core.rows import as_bytes, row_bytes
from fusco.cuda.kernels.abi import I32, I64, POINTER, U64, WARP_SIZE, struct
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.tuning import (
    EXCHANGE_CHANNELS as MAX_CHANNELS,
    EXCHANGE_DEPTH as DEPTH,
    EXCHANGE_THREADS as NUM_THREADS,
)

_LEAST_CHUNK_BYTES = 1 << 10  # where rings are small, channels are few
EXCHANGE_CONSTANTS = {"MAX_CHANNELS": MAX_CHANNELS, "DEPTH": DEPTH}


@cache
def exchange_type(num_ranks: int) -> type[ctypes.Structure]:
    """``ExchangeArgs`` of exchange_rows.cu."""
    return struct(
        "ExchangeArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER, "input output"),
        (U64, "flags rings"),
        (I64, "ring_bytes chunk_bytes"),
        (I64 * num_ranks, "input_ends output_ends"),
        (I32, "num_channels pad"),
    )


def exchange_rows(
    launcher: Launcher,
    layout: DeviceLayout,
    sent: tuple[torch.Tensor, Sequence[int]],
    received: tuple[torch.Tensor, Sequence[int]],
    num_sms: int | None = None,
) -> None:
    """Send rows to all ranks of the only node, and receive theirs; all launch it, in the same order.

    If a rank does not come, the communicator breaks, and what was received is undefined.

    Args:
        launcher: of this rank.
        layout: of every arena.
        sent: contiguous rows, and how many of them go to each rank, in order of rank.
        received: the same of what arrives, of rows of as many bytes.
        num_sms: at most as many SMs, which ranks need not agree on; by default all channels at once.
    """
    ring_bytes = layout.ring_depth * layout.slot_bytes
    num_channels = max(1, min(MAX_CHANNELS, ring_bytes // (DEPTH * _LEAST_CHUNK_BYTES)))
    input_ends, output_ends = (
        tuple(accumulate(number * row_bytes(rows) for number in num_rows)) for rows, num_rows in (sent, received)
    )
    arguments = exchange_type(launcher.num_ranks)(
        comm=launcher.comm,
        input=as_bytes(sent[0]).data_ptr(),
        output=as_bytes(received[0]).data_ptr(),
        flags=layout.offsets["exchanged"],
        rings=layout.offsets["rings"],
        ring_bytes=ring_bytes,
        chunk_bytes=ring_bytes // (num_channels * DEPTH) // 16 * 16,
        input_ends=input_ends,
        output_ends=output_ends,
        num_channels=num_channels,
        pad=0,
    )
    grid = min(-(-num_channels * WARP_SIZE // NUM_THREADS), launcher.sms(num_sms))
    launcher.launch("exchange_rows", EXCHANGE_CONSTANTS, arguments, grid=grid, num_threads=NUM_THREADS)
